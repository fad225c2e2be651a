"""Loading a folder: where the template comes from, and what can not be loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pictures import ROOT, noise

from processors import ProcessorError, PromptError, PromptProcessor, UnsupportedProcessorError
from processors.families import Family
from processors.families.table import FAMILIES


def _without_template(builders: Any, folder: Path) -> str:
    """Save a processor and take its template files away; return the template."""
    builders.save("llava", folder)
    (folder / "chat_template.jinja").unlink()
    template = builders.build("llava").chat_template
    assert isinstance(template, str)
    return template


def _edit(file: Path, **values: object) -> None:
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**settings, **values}))


@pytest.mark.parametrize("where", ["jinja", "json", "processor", "tokenizer", "both", "none"])
def test_where_the_template_is_found(builders: Any, tmp_path: Path, where: str) -> None:
    template = _without_template(builders, tmp_path)
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text(template)
    if where == "json":
        _edit(tmp_path / "chat_template.json", chat_template=template)
    if where in ("processor", "both"):
        _edit(tmp_path / "processor_config.json", chat_template=template)
    if where in ("tokenizer", "both"):
        text = "{{ 'no image here' }}" if where == "both" else template
        _edit(tmp_path / "tokenizer_config.json", chat_template=text)
    processor = PromptProcessor.from_pretrained(tmp_path)
    assert processor.has_chat_template == (where != "none")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    if where == "none":
        with pytest.raises(PromptError, match="no chat template"):
            processor.process(messages, [noise(20, 20)])
        assert "raw" in str(processor.describe()["chat_template"])
        assert len(processor.process("hi", [noise(20, 20)]).images) == 1
    else:
        assert "hi</s>" in processor.tokenizer.decode(processor.process(messages, [noise(20, 20)]).token_ids)


def test_the_configuration_says_which_token_takes_rows(builders: Any) -> None:
    processor = builders.build("gemma3")
    other = processor.tokenizer.convert_tokens_to_ids("<end_of_image>")
    believed = PromptProcessor.from_processor(processor, model_config={"image_token_id": other})
    assert believed.process("x", [noise(20, 20)]).images[0].range.num_embeds == 1
    foreign = PromptProcessor.from_processor(builders.build("gemma3"), model_config={"image_token_id": 10**6})
    assert foreign.process("x", [noise(20, 20)]).images[0].range.num_embeds == 16


@pytest.mark.parametrize(
    ("tower", "strategy", "count"),
    [("clip_vision_model", "default", 16), ("clip_vision_model", "full", 17), ("siglip_vision_model", "full", 16)],
)
def test_what_old_files_leave_out_comes_from_the_model(builders: Any, tower: str, strategy: str, count: int) -> None:
    """A 56-pixel picture of 14-pixel patches; a class token only where the tower has one."""
    processor = builders.build("llava")
    processor.patch_size = processor.vision_feature_select_strategy = None
    processor.num_additional_image_tokens = 0
    config = {
        "vision_config": {"model_type": tower, "patch_size": 14, "image_size": 56},
        "vision_feature_select_strategy": strategy,
    }
    made = PromptProcessor.from_processor(processor, model_config=config)
    assert made.process("x", [noise(30, 40)]).images[0].range.num_embeds == count


@pytest.mark.parametrize("case", ["missing", "empty", "file", "tokenizer only", "bad json"])
def test_folders_without_a_processor(builders: Any, tmp_path: Path, case: str) -> None:
    folder = tmp_path / "model"
    if case == "file":
        folder.write_text("x")
    elif case == "tokenizer only":
        builders.build("llava").tokenizer.save_pretrained(folder)
    elif case == "bad json":
        builders.save("llava", folder)
        (folder / "processor_config.json").write_text("{")
    elif case == "empty":
        folder.mkdir()
    with pytest.raises(UnsupportedProcessorError) as caught:
        PromptProcessor.from_pretrained(folder)
    assert len(str(caught.value)) < 700


def test_refused_families_say_why(builders: Any) -> None:
    with pytest.raises(UnsupportedProcessorError, match="have no place among"):
        PromptProcessor.from_processor(builders.build("blip"))
    for name, family in FAMILIES.items():
        assert family != Family(), f"{name} says nothing"


def test_a_processor_that_lays_prompts_out_otherwise_is_refused(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = builders.build("llava")
    original = type(processor).__call__

    def changed(self: Any, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
        return original(self, images=images, text=[f"{t}!" if len(images[0]) > 1 else t for t in text], **kwargs)

    monkeypatch.setattr(type(processor), "__call__", changed)
    with pytest.raises(UnsupportedProcessorError, match="lays prompts out"):
        PromptProcessor.from_processor(processor)


def test_an_output_that_nobody_claims_is_refused(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = builders.build("llava")
    original = type(processor).__call__

    def changed(self: Any, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
        outputs = original(self, images=images, text=text, **kwargs)
        if len(images[0]) > 1:
            outputs["secret"] = outputs["pixel_values"]
        return outputs

    monkeypatch.setattr(type(processor), "__call__", changed)
    with pytest.raises(UnsupportedProcessorError, match="secret"):
        PromptProcessor.from_processor(processor)


def test_an_output_that_follows_the_text_is_no_images(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept with an image, it would be another prompt's when the image is seen again."""
    import torch

    processor = builders.build("llava")
    original = type(processor).__call__

    def changed(self: Any, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
        outputs = original(self, images=images, text=text, **kwargs)
        outputs["places"] = torch.arange(outputs["input_ids"].shape[-1])[None]
        return outputs

    monkeypatch.setattr(type(processor), "__call__", changed)
    with pytest.raises(UnsupportedProcessorError, match=r"change with the text: \['places'\]"):
        PromptProcessor.from_processor(processor)


def test_counts_that_part_after_loading_are_an_error(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processor declares for a size is held against what it makes of every picture."""
    processor = builders.build("llava")
    made = PromptProcessor.from_processor(processor)
    original = type(processor)._get_num_multimodal_tokens

    def changed(self: Any, image_sizes: Any = None, **kwargs: Any) -> Any:
        counts = original(self, image_sizes=image_sizes, **kwargs)
        counts.num_image_tokens = [n + (width == 33) for n, (_, width) in zip(counts.num_image_tokens, image_sizes)]  # noqa: B905
        return counts

    monkeypatch.setattr(type(processor), "_get_num_multimodal_tokens", changed)
    assert made.process("x", [noise(34, 20)]).images
    with pytest.raises(ProcessorError, match=r"declares 17 tokens for an image of 33x20, but made 16 \(embeds\)"):
        made.process("x", [noise(33, 20)])


def test_the_processor_of_the_folder_is_used_and_named(builders: Any) -> None:
    """Two backends of one image processor resize a little differently: keys tell them apart, describe() names them."""
    import transformers

    own = builders.build("qwen2_vl")
    other = builders.build("qwen2_vl")
    other.image_processor = transformers.Qwen2VLImageProcessorPil(**other.image_processor.to_dict())
    made = [PromptProcessor.from_processor(processor) for processor in (own, other)]
    names = [processor.describe()["image_processor"] for processor in made]
    assert names == ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil"]
    one, two = (processor.process("x", [noise(97, 61)]).images[0] for processor in made)
    assert one.key != two.key
    assert one.range == two.range
    assert (one.tensors["pixel_values"] - two.tensors["pixel_values"]).abs().max() < 0.05


def test_a_wrong_declared_count_is_refused(builders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = builders.build("llava")
    original = type(processor)._get_num_multimodal_tokens

    def changed(self: Any, image_sizes: Any = None, **kwargs: Any) -> Any:
        counts = original(self, image_sizes=image_sizes, **kwargs)
        counts.num_image_tokens = [n + (1 if wrong else 0) for n in counts.num_image_tokens]
        return counts

    wrong = True
    monkeypatch.setattr(type(processor), "_get_num_multimodal_tokens", changed)
    with pytest.raises(UnsupportedProcessorError, match=r"declares 17 tokens .* makes 16 rows"):
        PromptProcessor.from_processor(processor)


def test_the_package_is_light_and_stands_alone() -> None:
    code = (
        "import sys, processors; processors.MediaOptions();"
        "heavy = [m for m in ('torch', 'transformers', 'PIL', 'numpy', 'mmserve') if m in sys.modules];"
        "assert not heavy, heavy; assert set(dir(processors)) >= set(processors.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "template", ["{% for", "{{ 1/0 }}", "{{ messages[0].nope.x }}", "{{ raise_exception('no') }}", "always the same"]
)
def test_a_template_that_renders_no_question_is_refused_at_load(builders: Any, template: str) -> None:
    processor = builders.build("llava")
    processor.chat_template = template
    with pytest.raises(UnsupportedProcessorError, match="can not render a plain question"):
        PromptProcessor.from_processor(processor)
