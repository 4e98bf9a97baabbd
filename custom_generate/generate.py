"The library calls this for `generate(custom_generate=FOLDER)`, where FOLDER holds custom_generate/generate.py."
from noc_nb.tools.generate import grid_beam

def generate(model, *, tokenizer=None, processor=None, **arguments):
    "Beam search with `words` that must come; `tokenizer` or `processor` spells them."
    return model.generate(custom_generate=grid_beam, processor=processor or tokenizer, **arguments)
