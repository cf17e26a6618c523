"""The engine from Python, in this process: prompts or conversations in, texts out. Not for serving others.

The engine, model loader and sampling defaults are those of `pipeline serve`.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import UserError
from ...base.option_fields import from_given, takes
from ...serving_check.engine.options import EngineOptions
from ...serving_check.engine.request import FinishReason, SamplingParams, TokenLogprobs
from ...serving_check.server.served_model import COMPLETION_MAX_TOKENS
from ..machine.tested_stack import warn_if_untested
from ..model_loader.served_checkpoint import build_engine, describe
from .serve import checkpoint_folder

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with a `role` and a `content`."""


@dataclass(frozen=True)
class Generation:
    """The output for one prompt."""

    text: str
    """The text without special tokens; empty if the checkpoint has no tokenizer."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    """`stop` if the last of `token_ids` is an end-of-sequence or stop token; otherwise `length`."""
    logprobs: tuple[TokenLogprobs, ...]
    """The logprobs of each token if the parameters ask for them, otherwise empty."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """The logprobs of the prompt's tokens from the second on; None unless the parameters ask for them."""


class LLM:
    """A checkpoint, loaded and warmed up. Use it as a context manager, or end it with `close`."""

    @takes(EngineOptions)
    def __init__(
        self, model: str | Path, *, revision: str | None = None, progress: bool | None = None, **options: Any
    ):
        """Load `model`, a folder or a Hub id of any convention we read.

        revision: branch, tag or commit, if `model` is a Hub id
        progress: bars for loading and generating; None shows them on a terminal only
        options:  the fields of EngineOptions (`serving_check/engine/options.py`)
        """
        warn_if_untested()
        folder = checkpoint_folder(model, revision)
        self.options = from_given(EngineOptions, options)
        self._progress = progress
        description = describe(folder)
        self.tokenizer = description.tokenizer
        self._defaults = description.defaults
        self._engine: Any = build_engine(folder, self.options)
        self._engine.warm_up(progress)

    @property
    def default_params(self) -> SamplingParams:
        """Return the default parameters of `generate` and `chat`: the checkpoint's own."""
        defaults = self._defaults
        return SamplingParams(
            max_tokens=defaults.max_tokens or COMPLETION_MAX_TOKENS,
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Continue every prompt, as a text or as token ids; all of them decode together.

        params: parameters for all prompts, or a list with one for each; None takes the checkpoint's own

        Return one result for each prompt, in order; for a single prompt, a list of one.
        """
        listed = _listed(prompts)
        return self._run([self._encode(prompt) for prompt in listed], params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[Generation]:
        """Answer a conversation, or each of several, through the tokenizer's chat template.

        template_options: variables of the template, such as `enable_thinking`

        Raise UserError if the checkpoint has no template, or its template refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("this checkpoint has no chat template; use generate() with a text instead")
        prompts = []
        for conversation in conversations:
            try:
                text = self.tokenizer.apply_chat_template(  # type: ignore[union-attr]
                    list(conversation), tokenize=False, add_generation_prompt=True, **template_options
                )
            except Exception as error:  # a template is a program of its maker's and may raise anything
                raise UserError(f"the chat template refuses these messages: {error}") from error
            prompts.append(self._encode(text, add_special_tokens=False))
        return self._run(prompts, params)

    def close(self) -> None:
        """Free the model and its KV pool; the object cannot be used afterwards."""
        if self._engine is None:
            return
        self._engine.jit_monitor.disarm()
        self._engine = None
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise UserError("this checkpoint has no tokenizer; give prompts as token ids")
        return list(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Generation]:
        if self._engine is None:
            raise UserError("this LLM was closed; make a new LLM")
        if params is not None and not isinstance(params, SamplingParams):
            params = list(params)
            if len(params) != len(prompts):
                raise UserError(
                    f"{len(prompts)} prompts have {len(params)} sampling parameters; give one for each prompt"
                )
        try:
            answers = self._engine.generate(prompts, params or self.default_params, self._progress)
        except BaseException:
            # A prompt that is refused, or Ctrl-C, must not leave the others running into the next call.
            self._engine.abort_all()
            raise
        return [
            Generation(
                ""
                if self.tokenizer is None
                else self.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True),
                tuple(answer.token_ids),
                answer.finish_reason,
                tuple(answer.logprobs),
                tuple(prompt),
                answer.prompt_logprobs,
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as a list, although a call may give a single one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
