"""Bar 6: LiteLLM and LangChain's ChatOpenAI against `pipeline serve`, with their default settings.

Whole and streamed answers, tools, JSON schemas, refusals; from an environment with both and Scalegate:

    pip install litellm langchain-openai llguidance
    python -P tests/bench/server/chat_clients.py examples/qwen3-pycode-5m
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.adapters import SubprocessEndpoint

RESULTS = Path(__file__).parents[1] / "results" / "server" / "chat_clients.json"
TEMPLATE = (
    "{% if tools %}Write <tool_call>JSON</tool_call>: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}# assistant: "
)
QUESTION = "def fibonacci(n):"
SCHEMA = {
    "title": "Answer",
    "description": "An answer.",
    "type": "object",
    "properties": {"size": {"type": "string", "enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "fetch", "description": "Fetch.", "parameters": SCHEMA}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
    with tempfile.TemporaryDirectory() as name:
        template = Path(name) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        serve = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(options.checkpoint)]
        serve += ["--port", "0", "--served-model-name", "served", "--chat-template", str(template)]
        serve += ["--max-num-seqs", "8", "--max-model-len", "1024"]
        with SubprocessEndpoint(serve, "served", log=Path(name) / "log.txt") as endpoint:
            url = endpoint.base_url + "/v1"
            cases = {**litellm_cases(url), **langchain_cases(url)}
            outcomes = {case: outcome(run) for case, run in cases.items()}
    versions = {package: version(package) for package in ("litellm", "langchain-openai", "openai")}
    write_json(options.out, {"versions": versions, "outcomes": outcomes})
    for case, said in outcomes.items():
        print(f"{case:32} {said}")
    sys.exit(any(said != "ok" for said in outcomes.values()))


def outcome(run: Callable[[], Any]) -> str:
    try:
        return "ok" if run() else "empty"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def litellm_cases(url: str) -> dict[str, Callable[[], Any]]:
    import litellm

    messages = [{"role": "user", "content": QUESTION}]
    common: dict[str, Any] = {"model": "openai/served", "api_base": url, "messages": messages}
    common |= {"max_tokens": 40}
    forced = {"type": "function", "function": {"name": "fetch"}}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}

    def refused() -> bool:
        try:
            litellm.completion(**{**common, "max_tokens": 5000})
        except litellm.BadRequestError:
            return True
        return False

    def called() -> Any:
        answer = litellm.completion(**common, tools=[TOOL], tool_choice=forced)
        return answer.choices[0].message.tool_calls[0].function.name == "fetch"

    return {
        "litellm whole": lambda: litellm.completion(**common).choices[0].message.content,
        "litellm streamed": lambda: list(litellm.completion(**common, stream=True)),
        "litellm tools": lambda: litellm.completion(**common, tools=[TOOL]).choices,
        "litellm chosen tool": called,
        "litellm schema": lambda: litellm.completion(**common, response_format=schema).choices,
        "litellm text completion": lambda: (
            litellm.text_completion(
                model="text-completion-openai/served", api_base=url, prompt=QUESTION, max_tokens=20
            ).choices
        ),
        "litellm refusal": refused,
    }


def langchain_cases(url: str) -> dict[str, Callable[[], Any]]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="served", base_url=url)
    short = ChatOpenAI(model="served", base_url=url, max_tokens=60)
    required = short.bind_tools([TOOL], tool_choice="fetch")
    return {
        "langchain whole": lambda: model.invoke(QUESTION).content,
        "langchain streamed": lambda: list(short.stream(QUESTION)),
        "langchain batch": lambda: short.batch([QUESTION] * 8),
        "langchain tools": lambda: short.bind_tools([TOOL]).invoke(QUESTION),
        "langchain chosen tool": lambda: required.invoke(QUESTION).tool_calls[0]["args"]["size"],
        "langchain structured output": lambda: short.with_structured_output(SCHEMA).invoke(QUESTION)["size"],
        "langchain conversation": lambda: short.invoke(
            [("system", "Code."), ("human", QUESTION), ("ai", "pass"), ("human", "more")]
        ),
    }


if __name__ == "__main__":
    main()
