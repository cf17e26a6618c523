"""The error for a model that the embedded engine cannot serve."""

from ...base.errors import UserError


def unsupported(architecture: str, reason: str) -> UserError:
    return UserError(
        f"the embedded engine cannot serve {architecture}: {reason}. Another engine may serve it: "
        "`vllm serve`, or --engine vllm for `pipeline validate` and `pipeline release`."
    )
