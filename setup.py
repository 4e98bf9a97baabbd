"The package, as `settings.ini` describes it."
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_namespace_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
name = cfg["lib_name"]
extras = {key.removeprefix("extra_"): value.split() for key, value in cfg.items() if key.startswith("extra_")}
pythons = [f"Programming Language :: Python :: {v}" for v in ("3", "3.10", "3.11", "3.12", "3.13", "3.14")]

def on_host(text):
    "A README whose pictures and links lead to the repository: a package index has neither."
    pictures = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\g<1>{cfg['git_url']}/raw/{cfg['branch']}/", text)
    return re.sub(r"(?<=\]\()(?!\w+:|#)", f"{cfg['git_url']}/blob/{cfg['branch']}/", pictures)

setup(
    name=name, version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"].split(", "),
    author=cfg["author"], author_email=cfg["author_email"], url=cfg["git_url"],
    license_expression="Apache-2.0", license_files=["LICENSE", "NOTICE"],
    long_description=on_host((here/"README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    packages=find_namespace_packages(include=[name, f"{name}.*"], exclude=["*__pycache__*"]),
    include_package_data=True, zip_safe=False,
    python_requires=f'>={cfg["min_python"]}', install_requires=cfg["requirements"].split(),
    extras_require=extras | {"dev": [*cfg["dev_requirements"].split(), *sum(extras.values(), [])]},
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": [f"{name}={name}._modidx:d"]},
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Science/Research", *pythons],
)
