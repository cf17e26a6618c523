"""The embedded engine: requests in, tokens out, one step at a time. Text, HTTP and threads are left to the
server.
"""

import random
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Prompt
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...base.batch_invariance import TUNED
from ...base.errors import UserError
from ...base.progress import progress_bar
from ...layouts.choosing.plan import device_model
from ...layouts.kv.format import KV_FORMATS
from ...layouts.kv.layer import KVScales
from ...layouts.modules.emulated_inputs import emulated_inputs
from ...layouts.modules.linear import packed_layers
from .attention import AttentionLayer, context_length
from .buckets import decode_buckets
from .cpu_runner import CpuRunner
from .cuda_runner import CudaRunner
from .device_copies import DeviceToHostCopy
from .grammar import Grammars
from .jit_monitor import JitMonitor
from .kv_pool import KVPool, build_pool, stored_bytes
from .model_runner import ModelRunner, StepResult
from .options import EngineOptions
from .prepare_model import prepare_model
from .request import EngineCapacity, EngineStats, FinishReason, SamplingParams, StepOutput, TokenLogprobs
from .sampling.sampler import prompt_logprobs, token_logprobs
from .scheduler import PrefillChunk, Schedule, Scheduler
from .sequence import UNKNOWN, Completion, Sequence
from .unsupported import unsupported

STEPS_REMEMBERED = 1 << 16


@dataclass
class Counters:
    """Totals since the engine was built or warmed up."""

    steps: int = 0
    waiting_by_step: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    running_by_step: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))


@dataclass(frozen=True)
class InFlightStep:
    """A launched batch whose drawn tokens are not on the host yet."""

    sequences: list[Sequence]
    lengths: list[int]
    """The length of each sequence, including its new token."""
    tokens: DeviceToHostCopy
    logprobs: dict[int, TokenLogprobs]


class Engine:
    """Continuous batching over one transformers model, which belongs to the engine from now on."""

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        eos_token_ids: frozenset[int],
        kv_scales: Mapping[int, KVScales] | None = None,
        tokenizer: Any | None = None,
    ):
        """kv_scales: the checkpoint's scales by layer, for KV formats that use them
        tokenizer: transformers' own, for grammars; without it, requests cannot ask for a grammar
        """
        if not isinstance(model, PreTrainedModel):
            raise unsupported(type(model).__name__, "it is not a transformers model")
        self.max_model_len = context_length(model, options.max_model_len)
        self.eos_token_ids = eos_token_ids
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self._grammars = Grammars(tokenizer, self.vocab_size)
        self._keeps_bits = options.batch_invariance != TUNED
        on_gpu = model.device.type == "cuda"
        packed, emulated = packed_layers(model), emulated_inputs(model)
        layers = prepare_model(model, options)
        self.pool = build_pool(layers, options, self.max_model_len, kv_scales or {}, model.device)
        self.capacity = EngineCapacity(
            options.max_num_seqs,
            self.pool.num_pages,
            self.pool.page_size,
            options.kv_format,
            packed,
            device_model(model.device),
            *stored_bytes(layers.attention, KV_FORMATS[options.kv_format], self.pool.page_size),
            layers.state_bytes_by_format,
            emulated,
        )
        self.runner = _build_runner(model, layers.attention, self.pool, options)
        chunk, chunk_while_decoding = options.chunks(on_gpu)
        replays = on_gpu and options.batch_invariance == "pin"
        self.scheduler = Scheduler(self.pool, chunk, chunk_while_decoding, replays, layers.original_context)
        self.jit_monitor = JitMonitor(options.jit_monitor)
        self._overlapped = options.overlapped and on_gpu
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: list[InFlightStep] = []
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def add_request(self, request_id: str, prompt: Prompt[int], params: SamplingParams) -> None:
        """Queue a request. A request that can never be served raises UserError, with nothing changed."""
        if request_id in self._sequences:
            raise ValueError(f"request {request_id!r} is already in the engine")
        tokens = list(prompt)
        if not tokens:
            raise UserError("the prompt is empty; give at least one token")
        longest = self.max_model_len - min(params.max_tokens, 1)
        if len(tokens) > longest:
            raise UserError(
                f"the prompt has {len(tokens)} tokens; with max_model_len={self.max_model_len} it may have "
                f"at most {longest}. Shorten the prompt."
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise UserError(
                    f"{name} is {getattr(params, name)}; the vocabulary has {self.vocab_size} tokens"
                )
        if any(token >= self.vocab_size for token, _ in params.logit_bias):
            raise UserError(f"logit_bias has token ids outside the vocabulary, 0..{self.vocab_size - 1}")
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise UserError(f"the prompt has token ids outside the vocabulary, 0..{self.vocab_size - 1}")
        seed = random.getrandbits(63) if params.seed is None else params.seed & (2**63 - 1)
        max_len = min(len(tokens) + params.max_tokens, self.max_model_len)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        matcher = None if params.grammar is None else self._grammars.matcher(params.grammar)
        sequence = Sequence(request_id, tokens, len(tokens), params, seed, max_len, ends, matcher)
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)
        self._counters.prompt_tokens += len(tokens)

    def abort(self, request_id: str) -> None:
        """Drop a request, waiting or running. A request that has finished meanwhile is no error."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._leave(sequence)

    def abort_all(self) -> None:
        """Drop every request."""
        for request_id in list(self._sequences):
            self.abort(request_id)

    def recover(self) -> list[str]:
        """Continue after `step` has raised: drop the requests to blame, and compute the others again.

        If exactly one request of the failed step had no token yet, that request is dropped. If several
        requests had none, none is dropped now, but each of them will be tried without the others. If every
        request had a token, all requests that ran are dropped. Tokens that are drawn again are the same,
        since they depend only on seed and position.

        The ids of the dropped requests are returned. An error is raised if the device itself has failed.
        """
        if self.runner.model.device.type == "cuda":
            torch.cuda.synchronize()
        self._in_flight = []
        everyone = list(self._sequences.values())
        ran = [sequence for sequence in everyone if sequence.row is not None or sequence.has_left]
        unproven = [sequence for sequence in ran if not sequence.is_proven]
        blamed = [] if len(unproven) > 1 else unproven or ran or everyone
        for sequence in blamed:
            del self._sequences[sequence.request_id]
        for sequence in self._sequences.values():
            if UNKNOWN in sequence.tokens[-2:]:
                del sequence.tokens[sequence.tokens.index(UNKNOWN, sequence.num_prompt) :]
        for sequence in unproven:
            sequence.is_suspect = True
        stay = sorted(self._sequences.values(), key=lambda sequence: not sequence.is_proven)
        for sequence in stay:
            sequence.has_left = False
        self.scheduler.restart(stay)
        return [sequence.request_id for sequence in blamed]

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one step of the model: a token for every decoding request, and prefill chunks."""
        clock = self.runner.clock
        with clock.step():
            outputs = self._overlapped_step() if self._may_overlap() else self._plain_step()
        self._counters.steps += 1
        self._counters.waiting_by_step += len(self.scheduler.waiting)
        if not self.has_work:
            clock.rest()
        self.jit_monitor.check()
        return outputs

    def _plain_step(self) -> list[StepOutput]:
        """Launch a step and wait for its tokens."""
        outputs = self._retire()
        self._in_flight += self._launch(self.scheduler.schedule())
        return outputs + self._retire()

    def _overlapped_step(self) -> list[StepOutput]:
        """Launch a step, and only then wait for the tokens of the step before.

        A request that ended in the step before is launched once more; that extra token is dropped when the
        launched step retires. Other requests may get the ended request's row and pages at once: the device
        runs steps in order, so the other requests write later.
        """
        launched = self._launch(self.scheduler.schedule())
        outputs = self._retire()
        self._in_flight = launched
        return outputs

    def _may_overlap(self) -> bool:
        """Say whether the next step may be launched before the host has the last tokens.

        The next step is launched early only while there is a page for each running request, since none may be
        preempted while its last token is unknown. Another condition is that no request follows a grammar,
        which needs the last token for the next one.
        """
        running = self.scheduler.running
        may = self._overlapped and self.pool.free_pages >= len(running)
        return may and not any(sequence.matcher is not None for sequence in running)

    def stats(self) -> EngineStats:
        """Return a snapshot of the figures. `running_by_step` and `compilations` hold what is new since the
        last snapshot."""
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
            times=self.runner.clock.times(),
            waiting_by_step=counters.waiting_by_step,
            running_by_step=running_by_step,
            compilations=self.jit_monitor.take(),
        )

    def warm_up(self, progress: bool | None = None) -> None:
        """Run every batch size of decoding and prefill once, so that nothing compiles while serving.

        progress: whether to show a bar; None shows it on a terminal only
        """
        greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        longest = max(1, min(self.scheduler.prefill_chunk, self.max_model_len - 1))
        mixed, decode = self.runner.warm_up_tokens(), self.runner.warm_up_requests()
        with progress_bar(
            total=len(mixed) + len(decode) + 1,
            desc="warm-up",
            shown=progress,
        ) as bar:
            for num_tokens in mixed:
                with torch.inference_mode():
                    self.runner.warm_up(num_tokens)
                bar.update()
            for num_requests in decode:
                self.generate([[0]] * num_requests, greedy)
                bar.update()
            self.generate([[0] * longest], greedy)
            bar.update()
        self._counters = Counters()
        self.runner.clock.reset()
        self.scheduler.preemptions = 0
        self.jit_monitor.arm()

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        progress: bool | None = False,
    ) -> list[Completion]:
        """Run all prompts to their end, as the offline API; return completions in the order of the
        prompts.
        """
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        names = [f"generate-{index}" for index in range(len(prompts))]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        logprobs: dict[str, list[TokenLogprobs]] = {name: [] for name in names}
        scores: dict[str, tuple[TokenLogprobs, ...]] = {}
        reasons: dict[str, FinishReason] = {}
        for name, prompt, request_params in zip(names, prompts, settings, strict=True):
            self.add_request(name, prompt, request_params)
        with progress_bar(total=len(prompts), unit="request", shown=progress) as bar:
            while len(reasons) < len(names):
                for output in self.step():
                    tokens[output.request_id] += output.token_ids
                    logprobs[output.request_id] += output.logprobs
                    if output.prompt_logprobs is not None:
                        scores[output.request_id] = output.prompt_logprobs
                    if output.finish_reason is not None:
                        reasons[output.request_id] = output.finish_reason
                        bar.update()
        return [
            Completion(tuple(tokens[name]), tuple(logprobs[name]), reasons[name], scores.get(name))
            for name in names
        ]

    def _launch(self, schedule: Schedule) -> list[InFlightStep]:
        """Launch a step. The step's sequences are extended at once, with tokens that are not known yet."""
        launched = []
        self._counters.running_by_step.append(len(schedule.decode))
        for batch in self.runner.batches(schedule):
            with self.runner.clock.launch():
                result = self.runner.run(batch)
                for chunk, logits in result.scored:
                    _score(chunk, logits, self._keeps_bits)
                for chunk in batch.prefill:
                    chunk.sequence.num_computed += chunk.count
                if result.sequences:
                    launched.append(self._in_flight_step(result))
        return launched

    def _in_flight_step(self, result: StepResult) -> InFlightStep:
        """Extend each sequence by an unknown token; sequences that reach their maximum length leave."""
        sequences = result.sequences
        logprobs = token_logprobs(result.logits, result.drawn, sequences, self._keeps_bits)
        for sequence in sequences:
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(UNKNOWN)
            if len(sequence.tokens) >= sequence.max_len:
                self._leave(sequence)
        lengths_after = [len(sequence.tokens) for sequence in sequences]
        return InFlightStep(sequences, lengths_after, DeviceToHostCopy(result.drawn), logprobs)

    def _retire(self) -> list[StepOutput]:
        """Wait for the tokens in flight, and finish the requests that they end."""
        outputs = []
        for step in self._in_flight:
            with self.runner.clock.waiting():
                drawn = step.tokens.wait()
            rows = zip(step.sequences, step.lengths, drawn, strict=True)
            for row, (sequence, length, token) in enumerate(rows):
                if self._sequences.get(sequence.request_id) is not sequence:
                    continue
                sequence.tokens[length - 1] = token
                wanted = length <= sequence.max_len
                if sequence.matcher is not None:
                    sequence.matcher.accept(token)
                self._counters.generation_tokens += wanted
                reason = sequence.finish_reason(length) if wanted else "length"
                if reason is not None:
                    del self._sequences[sequence.request_id]
                    self._leave(sequence)
                extra = (step.logprobs[row],) if row in step.logprobs else ()
                scores = sequence.scores if length == sequence.num_prompt + 1 else None
                drawn_tokens = (token,) if wanted else ()
                outputs.append(
                    StepOutput(sequence.request_id, drawn_tokens, extra if wanted else (), reason, scores)
                )
        self._in_flight = []
        return outputs

    def _leave(self, sequence: Sequence) -> None:
        if not sequence.has_left:
            sequence.has_left = True
            self.scheduler.remove(sequence)


def _build_runner(
    model: PreTrainedModel, layers: dict[int, AttentionLayer], pool: KVPool, options: EngineOptions
) -> ModelRunner:
    on_gpu = model.device.type == "cuda"
    chunk, _ = options.chunks(on_gpu)
    buckets = decode_buckets(options.max_num_seqs, model.device, options.decode_buckets)
    if on_gpu and buckets is not None:
        return CudaRunner(model, layers, pool, buckets, chunk, options.compiled, options.batch_invariance)
    return CpuRunner(model, layers, pool, buckets, chunk, options.batch_invariance)


def _score(chunk: PrefillChunk, logits: Tensor, one_by_one: bool) -> None:
    """Add the log-probabilities of the prompt tokens that follow the chunk's scored positions."""
    sequence, scored = chunk.sequence, chunk.scored
    if scored:
        followed = sequence.tokens[scored.start + 1 : scored.stop + 1]
        count = sequence.params.prompt_logprobs or 0
        sequence.prompt_logprobs += prompt_logprobs(logits, followed, count, one_by_one)
