"""For users' tests: a model and a tokenizer with which the whole engine runs in milliseconds."""

from mmserve.testing.byte_tokenizer import ByteTokenizer
from mmserve.testing.mock_model import MockModel, mock_image, mock_prompt

__all__ = ["ByteTokenizer", "MockModel", "mock_image", "mock_prompt"]
