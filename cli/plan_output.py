"""How a plan, and a machine's profile, are shown."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from pagedgen.sampling_params import DEFAULT_MAX_TOKENS

from .output import gib, say

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 48


def _print(*parts: Any) -> None:
    """Print tables on stdout."""
    text = io.StringIO()
    terminal = Console()
    Console(file=text, width=terminal.width, force_terminal=terminal.is_terminal, emoji=False).print(Group(*parts))
    say(text.getvalue().rstrip("\n"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(columns))
    for i, column in enumerate(columns or ("", "")):
        table.add_column(column, style=None if columns or i else "bold", justify="right" if columns and i else "left")
    return table


def _waterline(series: list[dict[str, float]], num_blocks: int) -> str:
    """Return the pool's use over the run as one line of bars."""
    if not series:
        return ""
    width = min(_WIDTH, len(series))
    picked = [series[i * len(series) // width] for i in range(width)]
    shares = [min(1.0, (p["used"] + p["kept"]) / num_blocks) for p in picked]
    return "".join(_BARS[round(share * (len(_BARS) - 1))] for share in shares)


def show_plan(report: Any) -> None:
    """Print a plan as a table on stdout."""
    plan, model = report.plan, report.model
    table = Table(title=f"pagedgen plan: {report.config['model']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    config = report.config
    table.add_row(
        "model",
        f"{model['model_type']}, {model['num_layers']} layers, {model['num_heads']}/{model['num_kv_heads']} heads of "
        f"{model['head_dim']}, {model['dtype']}, context {plan['max_model_len']:,}, "
        f"EOS {list(model['eos_token_ids']) or 'none'}",
    )
    table.add_row("weights", gib(plan["weights_bytes"]))
    table.add_row(
        "activation peak",
        f"{gib(plan['activation_peak_bytes'])} (estimate for {plan['max_num_batched_tokens']:,} tokens and "
        f"{plan['max_num_seqs']:,} rows a step; `run` measures it)",
    )
    table.add_row(
        "memory",
        f"{gib(plan['device_total_bytes'])} in all, {gib(plan['device_free_bytes'])} free ({config['device']}, "
        f"{report.memory_source}); at most {config['gpu_memory_utilization']:.0%} of all is used",
    )
    scales = " (int8, scales included)" if model["kv_cache_dtype"] == "int8" else ""
    table.add_row("KV per token", f"{plan['bytes_per_token']:,} bytes{scales}")
    table.add_row("KV per block", f"{plan['bytes_per_block']:,} bytes ({plan['block_size']} tokens)")
    table.add_row("for KV", gib(plan["available_kv_bytes"]))
    table.add_row("max_block_num", f"{plan['max_block_num']:,}")
    if plan["host_blocks"] or plan["disk_blocks"]:
        table.add_row("swap space", f"{plan['host_blocks']:,} blocks in host memory, {plan['disk_blocks']:,} on disk")
    table.add_row("rows", f"{plan['num_rows']:,} in {len(report.files)} file(s)")
    for label, key in (
        ("without a usable prompt", "num_row_errors"),
        ("too long", "num_too_long"),
        ("too large for the pool", "num_too_large"),
        ("beyond --max-total-tokens", "num_skipped"),
    ):
        if plan[key]:
            table.add_row(f"  {label}", f"{plan[key]:,} (row errors in the output)")
    default = ", the default" if report.max_tokens == DEFAULT_MAX_TOKENS else ""
    table.add_row(
        "tokens",
        f"{plan['prompt_tokens']:,} prompt, at most {plan['max_new_tokens']:,} generated "
        f"(max_tokens {report.max_tokens:,}{default})",
    )
    table.add_row("concurrent rows", f"{plan['max_concurrent_rows']:,} at this data's mean length")
    table.add_row("peak blocks needed", f"{plan['peak_blocks_needed']:,} (if every row runs to its max_tokens)")
    table.add_row(
        "prompt padding saved",
        f"{plan['padding_saved']:.1%} (prompts padded in batches of {plan['max_num_seqs']:,}: "
        f"{plan['padded_tokens']:,} tokens)",
    )
    _forecast_rows(table, report)
    parts: list[Any] = [table, _lengths_table(report), _block_sizes_table(report)]
    if report.sharing["num_groups"]:
        parts.append(_groups_table(report))
    parts += [f"note: {text}" for text in report.warnings]
    _print(*parts)


def _forecast_rows(table: Table, report: Any) -> None:
    told, sharing, plan = report.forecast, report.sharing, report.plan
    sampled = ""
    if told["simulated_rows"] < told["num_rows"]:
        sampled = f" (simulated on {told['simulated_rows']:,} of {told['num_rows']:,} rows)"
    table.add_row(
        "common beginnings",
        f"{sharing['num_grouped_rows']:,} rows in {sharing['num_groups']:,} groups; {sharing['attainable_tokens']:,} of "
        f"{sharing['prompt_tokens']:,} prompt tokens needn't be computed, {told['saved_tokens']:,} won't be",
    )
    table.add_row(
        "foretold run",
        f"{told['steps']:,} steps, {told['computed_tokens']:,} tokens computed, "
        f"{told['generated_tokens']:,} generated{sampled}",
    )
    table.add_row(
        "foretold blocks",
        f"peak {told['peak_blocks']:,} of {plan['num_blocks']:,}, {told['pool_use']:.1%} in use while rows wait; "
        f"{told['preemptions']:,} preemptions, "
        f"{told['recomputed_tokens']:,} tokens computed twice",
    )
    table.add_row("pool over the run", _waterline(told["waterline"], max(1, plan["num_blocks"])))
    if not told["tokens_per_s"]:
        unknown = "unknown: `pagedgen tune` measures this machine with this model"
        table.add_row("foretold time", unknown if report.profile is None else "none: no row runs")
    else:
        table.add_row(
            "foretold time",
            f"{told['generate_s']:,.1f} s generating ({told['tokens_per_s']:,.1f} tokens/s), {told['wall_s']:,.1f} s in all",
        )
    for other in report.what_if:
        seconds = "" if other["generate_s"] is None else f", {other['generate_s']:,.1f} s"
        table.add_row(
            f"with {other['what']}",
            f"{other['num_blocks']:,} blocks: {other['steps']:,} steps, {other['preemptions']:,} preemptions{seconds}",
        )


def _lengths_table(report: Any) -> Table:
    table = _table("prompt tokens", "from", "to", "rows", "")
    most = max((b["rows"] for b in report.prompt_lengths), default=1)
    for each in report.prompt_lengths:
        bar = "█" * round(24 * each["rows"] / most)
        table.add_row(f"{each['from']:,}", f"{each['to']:,}", f"{each['rows']:,}", bar)
    table.columns[-1].justify = "left"
    return table


def _block_sizes_table(report: Any) -> Table:
    table = _table("block sizes", "tokens", "slots wasted", "mean table", "prompt tokens shared", "decode attention")
    for each in report.block_sizes:
        size = each["block_size"]
        marks = " recommended" if size == report.recommended_block_size else ""
        marks += " (as planned)" if size == report.plan["block_size"] else ""
        decode = "not measured" if each["decode_s"] is None else f"{1e3 * each['decode_s']:.2f} ms"
        table.add_row(
            f"{size}{marks}", f"{each['waste']:.1%}", f"{each['mean_table_length']:.1f}", f"{each['shareable']:.1%}", decode
        )
    return table


def _groups_table(report: Any) -> Table:
    table = _table("largest groups", "rows", "common tokens")
    sharing = report.sharing
    for rows, tokens in zip(sharing["group_sizes"], sharing["group_tokens"], strict=True):
        table.add_row(f"{rows:,}", f"{tokens:,}")
    return table


def show_profile(profile: Any, path: str) -> None:
    """Print what `tune` measured as tables on stdout."""
    steps = _table("a step", "tokens", "seconds", "tokens/s")
    for tokens, seconds in zip(profile.tokens, profile.table_s, strict=True):
        rate = f"{tokens / seconds:,.0f}" if seconds else ""
        steps.add_row(f"{tokens:,}", f"{seconds:.4f}", rate)
    blocks = _table("decode attention, 64 rows of 512 tokens, all layers", "block size", "ms")
    for size, seconds in profile.decode_s_by_block_size.items():
        blocks.add_row(size, f"{1e3 * seconds:.2f}")
    facts = _table("pagedgen tune")
    facts.add_row("machine", profile.machine)
    facts.add_row("start", f"{profile.start_s:.1f} s")
    facts.add_row("context read by a decoding row", f"{1e9 * profile.decode_s_per_token:.1f} ns a token")
    facts.add_row("prompt tokens and what they see", f"{1e9 * profile.prefill_s_per_pair:.2f} ns a pair")
    facts.add_row("a sampled row", f"{1e6 * profile.sample_s_per_row:.0f} µs")
    facts.add_row("these numbers are off by", f"{profile.fit_error:.1%} of a measured step, on the mean")
    if profile.knee_tokens:
        facts.add_row("tokens in a step", f"{profile.knee_tokens:,} or more: larger steps are no faster by the token")
    if profile.num_seqs:
        facts.add_row("rows in flight", f"{profile.num_seqs:,}: more of them are hardly faster by the row")
    facts.add_row("profile", path)
    _print(steps, blocks, facts)
