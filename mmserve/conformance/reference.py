"""What plain transformers says: `generate()` on the same folder, one prompt at a time, float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmserve.conformance.packed import Answer
from mmserve.conformance.subject import GenerateInputs
from mmserve.errors import ConformanceError, MMServeError
from mmserve.model.generate_path import take_over_generation
from mmserve.model.model_config import one_line
from processors.types import ProcessedPrompt

__all__ = ["Reference"]


class Reference:
    """A folder's model as a user of transformers loads it.

    Raises:
        ConformanceError: transformers itself does not load it, or, when it is asked, does not run it.
    """

    def __init__(self, folder: Path, inputs: GenerateInputs) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        self._inputs = inputs
        with _told("from_pretrained()"):
            config = AutoConfig.from_pretrained(folder)
            auto = AutoModelForImageTextToText
            if type(config) not in auto._model_mapping:
                auto = AutoModelForCausalLM
            self._model: Any = auto.from_pretrained(folder, dtype=torch.float32).eval()
        take_over_generation(self._model)
        # from_pretrained() leaves weights in the mapped file, at addresses where products may round differently from
        # the same weights elsewhere: by 1e-4 in logits of 46, seen. Memory of their own, as any loader's.
        for parameter in self._model.parameters():
            parameter.data = parameter.data.clone()

    def answers(self, prompts: Sequence[ProcessedPrompt], new_tokens: int) -> list[Answer]:
        """`generate` for each of them."""
        return [self.generate(prompt, new_tokens) for prompt in prompts]

    def generate(self, prompt: ProcessedPrompt, new_tokens: int) -> Answer:
        """Greedy, exactly `new_tokens` of them, with the log-probabilities [V] of every step."""
        from transformers import GenerationConfig

        # M-RoPE models keep the last prompt's delta on themselves, and a text-only prompt would read it.
        for owner in self._model.modules():
            if hasattr(owner, "rope_deltas"):
                owner.rope_deltas = None
        config = GenerationConfig(max_new_tokens=new_tokens, output_logits=True, return_dict_in_generate=True)
        with _told("generate()"):
            output = self._model.generate(**self._inputs(self._model, prompt), generation_config=config)
        logprobs = [logits[0].float().log_softmax(dim=-1) for logits in output.logits]
        return Answer(output.sequences[0, -new_tokens:].tolist(), logprobs)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what transformers raises into a finding: there is nothing to compare with."""
    try:
        yield
    except MMServeError:
        raise
    except Exception as error:  # the model's own code, on a folder that we did not make
        raise ConformanceError(
            f"transformers' own {what} fails, so there is nothing to compare: {one_line(error)}"
        ) from error
