"""An OpenAI-compatible service of the decoding core. Needs ``pip install 'adaspec[serve]'``."""
