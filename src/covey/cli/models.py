"""The commands that use a model: eval, sample, serve, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from covey.cli.groups import MODELS
from covey.cli.options import (
    Json,
    SettingArguments,
    Trust,
    app,
    json_object,
    load_resolved,
    print_remarks,
    print_result,
)
from covey_verify.errors import ConfigError


@app.command(name="eval", group=MODELS)
def command_evaluate(
    config: Path, *settings: SettingArguments, trust: Trust = False, as_json: Json = False
) -> int:
    """Measure a model on held-out problems: greedy, pass@k, majority vote, with intervals.

    :param config: A YAML file, or the folder of a run, to measure its final model, or its newest checkpoint
        if it has not ended. Of several stages the last one counts.
    """
    resolved = load_resolved(config, settings, as_json, trained=True, trust=trust)
    print_remarks(as_json, [f"measuring {config}: loading ..."])
    from covey.commands.inference import evaluate_once
    from covey.system.console import RunConsole

    result = evaluate_once(resolved, RunConsole(quiet=as_json))
    lines = (f"{name:<10}{estimate}" for name, estimate in result.summary().items())
    print_result(as_json, result.record(), lines)
    return 0


@app.command(name="sample", group=MODELS)
def command_sample(
    model: str,
    *prompts: str,
    n: int = 1,
    max_tokens: int = 256,
    temperature: float = 1.0,
    chat: bool = False,
    system: str = "",
    chat_template_kwargs: str = "",
    tools: str = "",
    seed: int = 0,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    as_json: Json = False,
) -> int:
    """Complete prompts with a model; with --chat, show the conversations.

    :param model: A folder or hub id.
    :param prompts: Texts to complete; with --chat the messages of users, each in a chat of its own.
    :param n: Completions per prompt.
    :param max_tokens: Longest completion.
    :param temperature: 0 is greedy.
    :param chat: Send the prompts as a user's messages through the chat template.
    :param system: With --chat: the system message before them.
    :param chat_template_kwargs: With --chat: JSON for the template, such as '{"enable_thinking": false}'.
    :param tools: Tools that the model may call, such as python,tools.py:look_up.
    :param seed: The same seed gives the same completions.
    :param precision: As in a config; auto: as in the run that made the model, else the fastest here.
    """
    from covey import api
    from covey.commands.inference import transcripts

    arguments = json_object(chat_template_kwargs, "--chat-template-kwargs")
    tool_names = [name.strip() for name in tools.split(",") if name.strip()]
    print_remarks(as_json, [f"sampling from {model}: loading ..."])
    completions = api.sample(
        model,
        prompts,
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        chat=chat,
        seed=seed,
        system=system,
        chat_template_kwargs=arguments,
        tools=tool_names,
        precision=precision,
        quiet=as_json,
    )
    pairs = list(zip(prompts, completions, strict=True))
    # A prompt that is given twice has one key, with the completions of both.
    by_prompt = {prompt: [text for p, texts in pairs if p == prompt for text in texts] for prompt in prompts}
    print_result(as_json, by_prompt, transcripts(by_prompt, chat, system))
    return 0


@app.command(name="serve", group=MODELS)
def command_serve(
    model: str,
    *settings: SettingArguments,
    host: str = "127.0.0.1",
    port: int = 8000,
    weights: Path | None = None,
    name: str = "",
    tinker: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve a model over HTTP: OpenAI's completions, with token ids and log-probs.

    :param model: A folder or hub id.
    :param host: Address to listen on. If other machines can reach it, set a token in COVEY_TOKEN.
    :param port: Port to listen on; 0 takes any free one.
    :param weights: Folder with new weights, from which the server updates itself: a run's `sync`.
    :param name: Name of the model for callers; by default the folder's name.
    :param tinker: Speak Tinker's protocol: clients train adapters, kept in the folder of --output.
    """
    from covey.cluster.serving.run import serve_http
    from covey.tinker.run import serve_tinker

    serve = serve_tinker if tinker else serve_http
    serve(model, host, port, weights, name, settings)
    return 0


@app.command(name="export", group=MODELS)
def command_export(
    run: Path,
    *,
    step: int | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    gguf: str = "",
    push: str = "",
    public: bool = False,
    as_json: Json = False,
) -> int:
    """Write a checkpoint of a run as a model folder for other programs; by default the best evaluated one.

    :param run: Folder of the run; of several stages the last one counts.
    :param step: Number of steps done; a run keeps its newest checkpoints and the best evaluated one.
    :param output: The folder to write; by default `export/step_...` in the run's folder.
    :param gguf: Write a GGUF file for llama.cpp and Ollama too: f32, f16, bf16 or q8_0.
    :param push: Upload the folder to the Hugging Face hub as OWNER/NAME, a private repository.
    :param public: With --push, make a new repository public.
    """
    from covey.commands.export import export, upload

    if public and not push:
        raise ConfigError("--public says how --push uploads; add --push OWNER/NAME")
    written = export(run, step, output, gguf)
    files = [str(file) for file in written.glob("*.gguf")]
    address = upload(written, push, public) if push else ""
    lines = [f"model   {written}", *(f"gguf    {file}" for file in files)]
    lines += [f"hub     {address}"] if push else []
    print_result(as_json, {"model": str(written), "gguf": files, "hub": address}, lines)
    return 0
