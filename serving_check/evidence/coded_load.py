"""Whether requests are long enough that a KV format reads and writes quantized pages while it answers them.

A format that quantizes whole pages keeps short contexts unquantized. Short requests then say nothing about
its speed: its kernel could take a second, or a page could be written by a loop in Python.
"""

from ...layouts.kv.format import KV_FORMATS, PageCodedKVFormat
from ..settings import WorkloadSettings

ANSWERED_BEFORE = 32
"""How many output tokens an answer has before it fills a page, with the prompt length chosen here."""


def default_input_len(kv_cache_dtype: str | None) -> int:
    """Return the default number of prompt tokens per request. kv_cache_dtype: None if unknown"""
    form = _page_coded(kv_cache_dtype)
    if form is None:
        return WorkloadSettings.input_len
    return max(WorkloadSettings.input_len, form.plain_tokens + form.group_size - ANSWERED_BEFORE)


def uncoded(workload: WorkloadSettings, kv_cache_dtype: str | None) -> str | None:
    """Return why such requests do not exercise the format; None if they do."""
    form = _page_coded(kv_cache_dtype)
    if form is None:
        return None
    input_len, output_len, page = workload.input_len, workload.output_len, form.group_size
    wanted = f"the policy wants for instance {default_input_len(kv_cache_dtype)}"
    if input_len < form.plain_tokens:
        return (
            f"{input_len} prompt tokens a request, of which {kv_cache_dtype} codes none "
            f"until it has been answered with {form.plain_tokens - input_len}; {wanted}"
        )
    # The last token of an answer is not stored, and a page is written when the next token comes.
    if (input_len + output_len - 2) // page == input_len // page:
        return (
            f"{output_len} output tokens after {input_len} prompt tokens, in which {kv_cache_dtype} "
            f"fills no page of {page}; {wanted} prompt tokens"
        )
    return None


def _page_coded(kv_cache_dtype: str | None) -> PageCodedKVFormat | None:
    if kv_cache_dtype is None or kv_cache_dtype not in KV_FORMATS:
        return None
    form = KV_FORMATS[kv_cache_dtype]
    return form if isinstance(form, PageCodedKVFormat) else None
