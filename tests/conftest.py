"""Shared fixtures: tiny random-weight models of every family, a byte tokenizer, the engine under audit, the demo model.

The repository root comes off sys.path: our top-level `kernels/` would shadow another package of that name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as pagedgen.threads.prepare, before any test imports torch

os.environ.setdefault("NUMBA_NUM_THREADS", str(max(2, len(os.sched_getaffinity(0)))))  # tests about threads ask for two

# Side by side (pytest -n), each worker and what it starts has one core: two programs whose threads wait for each other on
# the same cores are many times slower.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER.startswith("gw"):
    _CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_CORES[int(_WORKER[2:]) % len(_CORES)]})

import pytest

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tool role here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<unk>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]

_SIZES = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

# family -> (config class, settings beyond _SIZES)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama_mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama_odd_head_dim": (
        "LlamaConfig",
        {"hidden_size": 60, "head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral_window": ("MistralConfig", {"sliding_window": 11, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 9, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 9, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen2_moe_window": (
        "Qwen2MoeConfig",
        {
            **_MOE,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
    ),
    "phimoe_window": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
}


def make_tokenizer(*, bos: bool = False, chat_template: str | None = CHAT_TEMPLATE):
    """Return a byte-level tokenizer of 263 ids; with `bos` it puts <s> before plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIALS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = chat_template
    return fast


class TinyModels:
    """Makes tiny models on demand and keeps each for the session."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._made: dict[str, Path] = {}

    def __call__(
        self, family: str = "llama", *, bos: bool = False, chat_template: str | None = CHAT_TEMPLATE, **overrides
    ) -> Path:
        key = repr((family, bos, chat_template, sorted(overrides.items())))
        if key not in self._made:
            self._made[key] = self._make(family, bos, chat_template, overrides)
        return self._made[key]

    def _make(self, family, bos, chat_template, overrides) -> Path:
        import torch
        import transformers

        class_name, settings = FAMILIES[family]
        config = getattr(transformers, class_name)(**{**_SIZES, **settings, **overrides})
        torch.manual_seed(len(family))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:  # all ones would hide a norm that is not applied
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif parameter.ndim == 1:
                torch.nn.init.normal_(parameter, std=0.1)
        path = self._directory / f"{family}-{len(self._made)}"
        model.save_pretrained(path)
        make_tokenizer(bos=bos, chat_template=chat_template).save_pretrained(path)
        return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    from pagedgen.model import demo

    path = demo.cache_path("smollm2-135m")
    if not (path / "config.json").is_file():
        pytest.skip("the demo model is not in the cache: pagedgen model get smollm2-135m")
    return path


class EngineRun:
    """One engine on one model; `answer` runs token-id prompts and returns each row's generated ids."""

    def __init__(self, model: Path, **settings):
        from pagedgen.config import EngineConfig
        from pagedgen.engine.engine import Engine
        from pagedgen.engine.opened import open_model

        settings = {"dtype": "float32", "audit": True, **settings}
        self.engine = Engine(open_model(EngineConfig(model=str(model), **settings)))

    @property
    def stats(self):
        return self.engine.stats

    def sequences(self, prompts, params=None, rows=None):
        """Run prompts; `rows` gives their row indices (default: their places).

        Return {row: finished Sequence}, with (row, sample) as key where a row has several samples.
        """
        from pagedgen.sampling_params import SamplingParams

        params = params or SamplingParams(max_tokens=12, ignore_eos=True)
        per_row = params if isinstance(params, list) else [params] * len(prompts)
        rows = list(range(len(prompts))) if rows is None else rows
        opened = self.engine.opened
        return self.run([opened.make_request(r, list(p), q) for r, p, q in zip(rows, prompts, per_row, strict=True)])

    def run(self, requests, **callbacks):
        """Run requests that were made already; see `sequences`."""
        from pagedgen.engine.planner import RequestLengths
        from pagedgen.stats import RunStats

        done = {}

        def key(request, sample):
            return (request.row_index, sample) if request.params.n > 1 else request.row_index

        self.engine.stats = RunStats()
        self.engine.generate(
            requests,
            self.engine.plan(RequestLengths(requests)),
            on_finished=lambda s: done.__setitem__(key(s.request, s.sample_index), s),  # None: no next turn
            on_error=lambda r, sample, e: done.__setitem__(key(r, sample), e),
            **callbacks,
        )
        assert done.keys() == {key(r, i) for r in requests for i in range(r.params.n)}
        return done

    def answer(self, prompts, params=None, rows=None):
        return {row: s.generated_token_ids for row, s in self.sequences(prompts, params, rows).items()}


@pytest.fixture
def eager_admission(monkeypatch):
    """Admit rows by the tokens they have now, so that small pools make them evict each other."""
    from pagedgen.engine.admission import Admission

    monkeypatch.setattr(Admission, "fits", lambda self, *row: True)


@pytest.fixture
def always_worth_it(monkeypatch):
    """Moving is always cheaper than computing again: tiny models compute a block quicker than a disk gives it back."""
    from pagedgen.engine.engine import Engine
    from pagedgen.engine.tiers import Tier

    original = Engine._tiers_worth_using

    def worth(self, plan, on_note):
        self._round_trip_s = {Tier.HOST: 0.0, Tier.DISK: 0.0}
        return original(self, plan, on_note)

    monkeypatch.setattr(Engine, "_tiers_worth_using", worth)


@pytest.fixture(scope="session")
def engine_run():
    return EngineRun


@pytest.fixture(scope="session")
def reference_generate():
    """Greedy `transformers` generate in fp32, one row at a time, by its plain ("eager") attention.

    Its SDPA path leaves out Gemma 2's softcap in some versions (5.17: other tokens; 5.24: refused).
    """

    def generate(model: Path, prompts, max_tokens):
        import torch
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
        reference.generation_config.eos_token_id = None
        answers = {}
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt)])
            with torch.inference_mode():
                out = reference.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
                )
            answers[row] = out[0, len(prompt) :].tolist()
        return answers

    return generate


def random_prompts(lengths, vocab_size=263, seed=0):
    import numpy as np

    rng = np.random.default_rng(seed)
    return [rng.integers(7, vocab_size, size=n).tolist() for n in lengths]


@pytest.fixture(scope="session")
def make_prompts():
    return random_prompts
