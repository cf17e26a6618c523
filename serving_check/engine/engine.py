"""The embedded engine: requests in, tokens out, one step at a time. Not for text, HTTP or threads."""

import random
import time
from collections import deque
from collections.abc import Sequence as Prompt
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from ...layouts.errors import UserError
from ...layouts.kv_format import KV_FORMATS
from .attention import attention_layers, context_length, unsupported
from .kv_pool import KVPool, pool_pages
from .model_runner import ModelRunner, decode_buckets
from .request import EngineConfig, EngineStats, FinishReason, SamplingParams, StepOutput, TokenLogprobs
from .sampler import SamplingBatch, sample, token_logprobs
from .scheduler import Scheduler
from .sequence import Completion, Sequence

STEPS_REMEMBERED = 1 << 16


@dataclass
class Counters:
    """What the engine has done since it was built or warmed up."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    running_by_step: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))


class Engine:
    """Continuous batching over one transformers model, which from here on belongs to the engine."""

    def __init__(self, model: nn.Module, config: EngineConfig, eos_token_ids: frozenset[int]):
        if not isinstance(model, PreTrainedModel):
            raise unsupported(type(model).__name__, "it is not a transformers model")
        self.max_model_len = context_length(model, config.max_model_len)
        self.eos_token_ids = eos_token_ids
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size
        model.eval()
        layers = attention_layers(model)
        kv_format = KV_FORMATS["unquantized"]
        num_pages = pool_pages(
            layers,
            kv_format,
            config.page_size,
            config.kv_cache_tokens,
            config.max_num_seqs,
            self.max_model_len,
            model.device,
        )
        self.pool = KVPool(
            layers,
            kv_format,
            num_pages,
            config.page_size,
            config.max_num_seqs,
            self.max_model_len,
            model.device,
        )
        buckets = config.decode_buckets or decode_buckets(config.max_num_seqs, model.device)
        self.runner = ModelRunner(model, layers, self.pool, buckets)
        self.scheduler = Scheduler(self.pool, config.prefill_chunk)
        self._sequences: dict[str, Sequence] = {}
        self._sampling: tuple[list[Sequence], SamplingBatch] | None = None
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, request_id: str, prompt: Prompt[int], params: SamplingParams) -> None:
        """Queue a request. What can never be served is refused here, and nothing else is touched."""
        if request_id in self._sequences:
            raise ValueError(f"request {request_id!r} is already in the engine")
        tokens = list(prompt)
        if not tokens:
            raise UserError("the prompt is empty; give at least one token")
        if len(tokens) >= self.max_model_len:
            raise UserError(
                f"the prompt has {len(tokens)} tokens; with max_model_len={self.max_model_len} it may have "
                f"at most {self.max_model_len - 1}. Shorten it."
            )
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise UserError(f"the prompt has token ids outside the vocabulary, 0..{self.vocab_size - 1}")
        seed = random.getrandbits(63) if params.seed is None else params.seed & (2**63 - 1)
        max_len = min(len(tokens) + params.max_tokens, self.max_model_len)
        sequence = Sequence(request_id, tokens, len(tokens), params, seed, max_len)
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)
        self._counters.prompt_tokens += len(tokens)

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it stands; one that has finished meanwhile is no error."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One step of the model: a token for every decoding request, then a chunk of the waiting prompts."""
        started = time.perf_counter()
        schedule = self.scheduler.schedule()
        outputs: list[StepOutput] = []
        if schedule.decode:
            logits = self.runner.decode(schedule.decode)
            outputs += self._advance(schedule.decode, logits)
        if schedule.prefill:
            logits = self.runner.prefill(schedule.prefill)
            for piece in schedule.prefill:
                piece.sequence.num_computed += piece.count
            completed = [piece.sequence for piece in schedule.prefill if piece.completes]
            if completed:
                outputs += self._advance(completed, logits)
        self._counters.steps += 1
        self._counters.running_by_step.append(len(schedule.decode))
        self._counters.step_seconds = time.perf_counter() - started
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot; running_by_step starts afresh with each."""
        counters = self._counters
        running_by_step = tuple(counters.running_by_step)
        counters.running_by_step.clear()
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_cache_usage=self.pool.usage,
            preemptions=self.scheduler.preemptions,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            steps=counters.steps,
            step_seconds=counters.step_seconds,
            running_by_step=running_by_step,
        )

    def warm_up(self, progress: bool | None = None) -> None:
        """Meet every decode batch size and a full prefill chunk before the first request does.

        progress: None shows a bar on a terminal, True always, False never.
        """
        greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        longest = max(1, min(self.scheduler.prefill_chunk, self.max_model_len - 1))
        with tqdm(
            self.runner.warm_up_sizes(), "warm-up", disable=None if progress is None else not progress
        ) as bar:
            for size in bar:
                self.generate([[0]] * size, greedy)
        self.generate([[0] * longest], greedy)
        self._counters = Counters()
        self.scheduler.preemptions = 0

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        progress: bool | None = False,
    ) -> list[Completion]:
        """The offline API: all prompts to their ends, answers in the order of the prompts."""
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        names = [f"generate-{index}" for index in range(len(prompts))]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        logprobs: dict[str, list[TokenLogprobs]] = {name: [] for name in names}
        reasons: dict[str, FinishReason] = {}
        for name, prompt, one in zip(names, prompts, settings, strict=True):
            self.add_request(name, prompt, one)
        with tqdm(
            total=len(prompts), unit="request", disable=None if progress is None else not progress
        ) as bar:
            while len(reasons) < len(names):
                for output in self.step():
                    tokens[output.request_id] += output.token_ids
                    logprobs[output.request_id] += output.logprobs
                    if output.finish_reason is not None:
                        reasons[output.request_id] = output.finish_reason
                        bar.update()
        return [Completion(tuple(tokens[name]), tuple(logprobs[name]), reasons[name]) for name in names]

    def _advance(self, sequences: list[Sequence], logits: Tensor) -> list[StepOutput]:
        """Draw each sequence's next token, append it, and see off those that are done."""
        batch = self._sampling_batch(sequences)
        positions = torch.tensor([len(sequence.tokens) for sequence in sequences], device=logits.device)
        drawn = sample(logits, batch, positions)
        logprobs = token_logprobs(logits, drawn, batch)
        outputs = []
        for row, (sequence, token) in enumerate(zip(sequences, drawn.tolist(), strict=True)):
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(token)
            reason = sequence.finish_reason(self.eos_token_ids)
            if reason is not None:
                del self._sequences[sequence.request_id]
                self.scheduler.remove(sequence)
            extra = (logprobs[row],) if row in logprobs else ()
            outputs.append(StepOutput(sequence.request_id, (token,), extra, reason))
        self._counters.generation_tokens += len(outputs)
        return outputs

    def _sampling_batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """Built anew only when the batch is another than in the step before."""
        if self._sampling is None or self._sampling[0] != sequences:
            self._sampling = (list(sequences), SamplingBatch.of(sequences, self.runner.device))
        return self._sampling[1]
