"""What single families do differently; everything else follows from their processor's own outputs.

spec        the form of an entry
framing     text that a processor puts around the prompt
numbering   images that are numbered in the prompt
mllama      images beside the prompt, read by cross attention
idefics2    boundary tokens that touching images share
table       processor class -> its entry
"""

from __future__ import annotations

from processors.families.spec import Family
from processors.families.table import family_of

__all__ = ["Family", "family_of"]
