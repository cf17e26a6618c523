"""The KV format seam takes a format that quantizes whole pages and keeps a sink and a tail as they are.

The format is the plainest of its kind: a request's first page and its unfinished one stay unquantized beside
the pool, in the request's row; a page that fills up goes into the pool, with a scale for each channel.
"""

import copy

import pytest
import torch
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.layouts.kv.attention_metadata import AttentionMetadata
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.layer import KVScales, KVShape, PoolSize, Workspaces
from scalegate.serving_check.engine import kv_pool
from scalegate.serving_check.engine.attention import AttentionLayer
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen3Config
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

PAGE, LEVELS = 8, 7
LENGTHS = (1, 7, 8, 9, 16, 30, 41)
NEW_TOKENS = 14
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def round_page(page: Tensor) -> Tensor:
    """[P, H_kv, D] in few levels for each channel over the page's tokens: coarse, so that it matters."""
    scale = page.abs().amax(dim=0).clamp(min=1e-6) / LEVELS
    return (page / scale).round() * scale


def softmax_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """query [H, D] over keys and values [n, H_kv, D]."""
    groups = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    weights = (torch.einsum("hd,nhd->hn", query, keys) * scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)


class WholePages:
    """One layer. All tensors hold keys and values side by side: [2, ...]."""

    def __init__(self, shape: KVShape, size: PoolSize):
        page = (PAGE, shape.heads, shape.key_dim)
        self.pages = torch.zeros(2, size.num_pages, *page)
        self.sinks = torch.zeros(2, size.max_requests, *page)
        self.tails = torch.zeros(2, size.max_requests, *page)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        output = torch.zeros_like(query)
        for request in metadata.host.requests():
            tokens = slice(request.first_token, request.first_token + request.count)
            new, row = torch.stack([key[tokens], value[tokens]]), request.row
            for index in range(request.count):
                page, offset = divmod(request.start + index, PAGE)
                (self.tails if page else self.sinks)[:, row, offset] = new[:, index]
                if page and offset == PAGE - 1:
                    rounded = [round_page(tail) for tail in self.tails[:, row]]
                    self.pages[:, request.pages[page]] = torch.stack(rounded)
                seen = request.start + index + 1
                whole = seen // PAGE
                stored = [self.pages[:, page] for page in request.pages[1:whole]]
                unfinished = self.tails[:, row, : seen - max(whole, 1) * PAGE] if page else new[:, :0]
                keys, values = torch.cat([self.sinks[:, row, :seen], *stored, unfinished], dim=1)
                at = request.first_token + index
                output[at] = softmax_attention(query[at], keys, values, options.scale)
        return output


class WholePageFormat:
    def bytes_per_page(self, shape: KVShape, page_size: int) -> int:
        return page_size * shape.heads * (shape.key_dim + shape.value_dim)

    def bytes_per_request(self, shape: KVShape) -> int:
        return 2 * PAGE * shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize

    def page_size(self, device: torch.device) -> int:
        return PAGE

    def allocate(
        self,
        shape: KVShape,
        size: PoolSize,
        device: torch.device,
        scales: KVScales | None,
        workspaces: Workspaces,
    ) -> WholePages:
        return WholePages(shape, size)


def whole_page_attention(module, query, key, value, attention_mask, scaling, **options):
    """The same arithmetic with everything at hand: no pool, no steps."""
    outputs = []
    for position in range(query.shape[2]):
        whole = (position + 1) // PAGE
        seen = []
        for x in (key, value):
            x = x[0].transpose(0, 1)
            rounded = [round_page(x[PAGE * page : PAGE * (page + 1)]) for page in range(1, whole)]
            first, rest = x[: min(PAGE, position + 1)], x[max(whole, 1) * PAGE : position + 1]
            seen.append(torch.cat([first, *rounded, rest]))
        outputs.append(softmax_attention(query[0, :, position], *seen, scaling))
    return torch.stack(outputs)[None], None


AttentionInterface.register("whole_pages", whole_page_attention)
AttentionMaskInterface.register("whole_pages", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KV_FORMATS._entries, "whole_pages", WholePageFormat())
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=160,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


def expected(model) -> list[tuple[int, ...]]:
    model = copy.deepcopy(model)
    model.set_attn_implementation("whole_pages")
    rows = []
    for prompt in prompts():
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        rows.append(tuple(tokens[len(prompt) :]))
    return rows


def served(model, **sizes) -> tuple[Engine, list[tuple[int, ...]]]:
    config = EngineOptions(
        **{"prefill_chunk": 20, "max_num_seqs": 8, "kv_cache_dtype": "whole_pages", **sizes}
    )
    engine = Engine(copy.deepcopy(model), config, frozenset())
    return engine, [answer.token_ids for answer in engine.generate(prompts(), GREEDY)]


def test_tokens_are_the_same_batched_again_alone_and_preempted(model):
    want = expected(model)
    assert len(set(want)) == len(want)
    engine, batched = served(model)
    assert batched == want and engine.pool.page_size == PAGE
    assert [answer.token_ids for answer in engine.generate(prompts(), GREEDY)] == want
    assert [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts()] == want
    assert served(model, decode_buckets=(1, 4, 8))[1] == want, "rows that only pad a batch"
    tight, preempted = served(model, kv_cache_tokens=72, max_model_len=64)
    assert preempted == want and tight.stats().preemptions > 0
    assert served(model, kv_cache_dtype="unquantized")[1] != want, "rounding pages does not matter"


def test_what_rows_take_is_left_to_them(monkeypatch: pytest.MonkeyPatch):
    shape = KVShape(8, 128, 128, torch.bfloat16, 32)
    per_row = WholePageFormat().bytes_per_request(shape)
    monkeypatch.setattr(kv_pool, "free_memory", lambda device: 100 * per_row)
    layers = {0: AttentionLayer(shape, AttentionOptions(1.0))}

    def pages(max_num_seqs: int) -> int:
        cpu = torch.device("cpu")
        return kv_pool.pool_pages(layers, WholePageFormat(), PAGE, None, max_num_seqs, 64, cpu)

    assert pages(49) == pytest.approx(pages(19) * 50 / 80, rel=0.02)
