"""Benchmarks in small: what they return, what they print, and that the shapes are the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmserve.bench import attention, compare
from mmserve.bench.shapes import SHAPES, build_shape
from mmserve.demo import demo_model_folder
from mmserve.errors import ConfigError


class TestShapes:
    def test_smolvlm_has_the_parameters_of_the_published_model(self) -> None:
        from transformers import AutoModelForImageTextToText

        config, processor = SHAPES["smolvlm-256m"]()
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 256
        assert len(processor.tokenizer) == 49280
        assert processor.tokenizer.convert_tokens_to_ids("<image>") == config.image_token_id

    def test_a_picture_makes_thirteen_tiles(self) -> None:
        from PIL import Image

        _, processor = SHAPES["smolvlm-256m"]()
        tiles = processor.image_processor(Image.new("RGB", (512, 384)), return_tensors="pt")["pixel_values"]
        assert tiles.shape == (1, 13, 3, 512, 512)

    def test_an_unknown_shape_lists_the_known(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"known: smolvlm-256m, qwen2\.5-vl-small"):
            build_shape("gpt-9", tmp_path)

    def test_a_folder_that_holds_one_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert build_shape("smolvlm-256m", tmp_path) == tmp_path
        assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


class TestCompare:
    def test_measures_both_sides_and_says_so(self, tmp_path: Path) -> None:
        work = compare.Workload(image_size=(64, 64), tokens=2, batch=2, text_tokens=8, decode_tokens=4, repeats=1)
        said: list[str] = []
        result = compare.run(
            demo_model_folder(),
            workload=work,
            only=("one_request", "many_requests", "first_token_warm"),
            say=said.append,
        )
        assert set(result["ratio"]) == {"one_request", "many_requests", "first_token_warm"}
        assert len(said) == 3
        for name, ratio in result["ratio"].items():
            assert ratio == pytest.approx(result["transformers"][name] / result["mmserve"][name])
        text = compare.render(result, tmp_path / "plot.png")
        assert "2 requests at once, s" in text
        assert json.loads(text.splitlines()[-1])["workload"]["batch"] == 2
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


class TestAttention:
    def test_checks_every_backend_and_mode(self) -> None:
        result = attention.run("cpu", dtypes=("float32",), prefill=(16,), decode=((2, 70),))
        assert result["passed"]
        checked = {(check["backend"], check["mode"]) for check in result["checks"] if check["error"] is not None}
        assert {("reference", mode) for mode in attention.MODES} <= checked
        declined = [check for check in result["checks"] if check["backend"] == "xformers"]
        assert all("CUDA" in check["declined"] for check in declined)
        assert {entry["what"] for entry in result["times"]} == {"prefill 16", "decode 2 x 70"}
        text = attention.render(result)
        assert "of the bandwidth bound" in text
        assert json.loads(text.splitlines()[-1])["device"] == "cpu"

    def test_a_wrong_backend_is_found_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from mmserve.attention.reference import ReferenceBackend

        def wrong(self, query, key, value, cache, spec, metadata):
            return right(self, query, key, value, cache, spec, metadata) * 1.01

        right = ReferenceBackend.attend
        monkeypatch.setattr(ReferenceBackend, "attend", wrong)
        monkeypatch.setattr(attention, "known_backends", lambda: ("reference",))
        result = attention.run("cpu", dtypes=("float32",), prefill=(), decode=())
        assert not result["passed"]
        assert "WRONG" in attention.render(result)
