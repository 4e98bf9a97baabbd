"The package, as `settings.ini` describes it."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"].split(", "),
    author=cfg["author"], author_email=cfg["author_email"], url=cfg["git_url"], license="Apache-2.0",
    long_description=(here/"README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    packages=find_packages(include=[cfg["lib_name"], f'{cfg["lib_name"]}.*']), include_package_data=True,
    python_requires=f'>={cfg["min_python"]}', install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split()},
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": [f'{cfg["lib_name"]}={cfg["lib_name"]}._modidx:d']},
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Science/Research", "Programming Language :: Python :: 3",
                 "License :: OSI Approved :: Apache Software License"],
    zip_safe=False,
)
