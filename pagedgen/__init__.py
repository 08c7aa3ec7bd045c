"""Offline batch generation over a paged KV cache: every completion, in order, exactly once.

    from pagedgen import LLM, SamplingParams
    outputs = LLM("smollm2-135m").generate(["Hello"], SamplingParams(max_tokens=32))

Importing this loads neither torch nor transformers; making an `LLM` does.
"""

from .errors import PagedgenError, UsageError
from .llm import LLM
from .request import CompletionOutput, RequestOutput
from .sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "PagedgenError", "RequestOutput", "SamplingParams", "UsageError"]
