"""The goldens that are tables of values: for each JSON file of this folder the function that computes it again."""

import ast
import gzip
import hashlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import golden_commands
import golden_library as library
import golden_runs
import numpy as np

HERE = Path(__file__).parent
PROJECT = Path(os.environ.get("LMCORE_GOLDENS_PROJECT", HERE.parents[1]))
"""Whose tests and results are read."""

TEXT = "Once upon a time, Tim's 12 naïve café cats\n\n sat — 日本語 🙂.<|endoftext|>The   end\r\n"


def tokenizers() -> dict[str, Any]:
    """Fingerprints of tokenizers that are trained here, and of GPT-2's where its files are; and ids of a text."""
    with tempfile.TemporaryDirectory() as folder:
        stories = Path(folder) / "stories.txt"
        stories.write_text(library.story_text(300, seed=1), encoding="utf-8")
        found = {f"stories:{size}": trained(stories, size) for size in (257, 300, 1000)}
    gpt2 = Path(os.environ.get("LMCORE_TEST_DATA", PROJECT.parent / "shared" / "data")) / "gpt2"
    if gpt2.is_dir():
        found["gpt2"] = library.load_gpt2(gpt2)
    return {
        name: {"fingerprint": each.fingerprint, "vocab_size": each.vocab_size, "ids": each.encode(TEXT)}
        for name, each in found.items()
    }


def trained(path: Path, vocab_size: int) -> Any:
    end = "<|endoftext|>"
    return library.Tokenizer(*library.train_bpe([path], vocab_size, [end]), [end])


def corpora() -> dict[str, Any]:
    """What is prepared from the embedded stories and from a file: fingerprints and counts of every split."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        stories = Path(folder) / "stories.txt"
        stories.write_text(library.story_text(200, seed=3), encoding="utf-8")
        cases = {
            "embedded, 60 stories, bpe:260": ("embedded", "bpe:260", {"num_documents": 60}),
            "embedded, 200 stories, seed 7, bpe:512": ("embedded", "bpe:512", {"num_documents": 200, "seed": 7}),
            "file, bpe:300": (stories, "bpe:300", {}),
            "file, a quarter held out, bpe:300": (stories, "bpe:300", {"valid_fraction": 0.25}),
        }
        for number, (name, (source, tokenizer, settings)) in enumerate(cases.items()):
            config = library.CorpusConfig(**settings)
            data = library.prepare(source, tokenizer, Path(folder) / str(number), config, progress=False)
            manifest = {key: value for key, value in data.manifest.items() if key != "request"}  # it holds paths
            found[name] = {"fingerprint": data.fingerprint, "manifest": rounded(manifest, 12)}
    return found


def batches() -> dict[str, Any]:
    """First tokens of the windows of a batch, by sampling, seed and step, in a text whose token i is i."""
    x = np.arange(6000, dtype=np.uint16)
    found = {}
    for sampling in ("random", "epoch"):
        for seed in (0, 5):
            config = library.replace(golden_runs.base_config(), sampling=sampling, seed=seed)
            for step in (0, 1, 1000):
                inputs, targets = library.batch_at_step(x, config, step, "cpu")
                assert (targets == inputs + 1).all(), "targets are the next tokens"
                found[f"{sampling}, seed {seed}, step {step}"] = inputs[:, 0].tolist()
    return found


def grammar() -> dict[str, Any]:
    """Entropy of a story in nats, and the digests of some stories."""
    texts = {
        f"{split}, seed {seed}": hashlib.sha256(library.story_text(20, seed, split).encode()).hexdigest()
        for split in ("train", "valid")
        for seed in (0, 1)
    }
    return {"entropy_per_document": rounded(library.entropy_per_document(), 12), "sha256 of 20 stories": texts}


MOST_LAYERS = 12
"""Of a size whose peak is predicted: it takes a tenth of a second a layer."""


def architecture() -> dict[str, Any]:
    """Names and shapes of the weights; parameters, FLOPs and predicted peaks of the named sizes; the presets."""
    two = library.model_config("smoke", vocab_size=300, context_length=32)
    kinds = {
        "rope, swiglu, pre": two,
        "tied": library.replace(two, tie_embeddings=True),
        "sinusoidal, silu, none": library.replace(two, position="sinusoidal", ffn="silu", norm="none"),
    }
    weights = {
        name: {key: list(tensor.shape) for key, tensor in library.TransformerLM(config).state_dict().items()}
        for name, config in kinds.items()
    }
    sizes = {}
    for size in library.MODEL_SIZES:
        config = library.model_config(size, context_length=256)
        modes = ("forward", "train_step") if config.num_layers <= MOST_LAYERS else ()
        peaks = {mode: library.predicted_peak(config, 4, mode=mode) for mode in modes}
        sizes[size] = {
            "parameters": library.num_parameters(config),
            "forward_flops": library.forward_flops(config, 4),
            "training_flops": library.training_flops(config, 4),
            "peaks": {mode: [peak["peak_bytes"], peak["stage"]] for mode, peak in peaks.items()},
        }
    presets = {name: json.loads(json.dumps(library.to_dict(config))) for name, config in library.RECIPES.items()}
    return {"state_dict": weights, "sizes": sizes, "presets": presets}


def signatures() -> dict[str, Any]:
    """The signatures of the functions and classes that the handouts name: parameters and defaults, without types."""
    return {
        name: ", ".join(
            parameter.name + ("" if parameter.default is parameter.empty else f"={parameter.default!r}")
            for parameter in inspect.signature(getattr(library.handout, name)).parameters.values()
        )
        for name in library.HANDOUT
    }


def suites(tests: list[str] | None = None) -> dict[str, Any]:
    """The tests of the long suites; the faults that were tried, by kind; and the numbers that say how many."""
    tests = sorted(collected() if tests is None else tests)
    report = library.read_json(PROJECT / "results" / "faults.json")["faults"]
    return {
        "slurm": [name for name in tests if name.startswith("tests/slurm/")],
        "faults": [name for name in tests if name.startswith("tests/faults/")],
        "kinds": {row["kind"]: [row["tried"], row["survived"], row["refused_in_words"], row["lost"]] for row in report},
        "counted": sorted(kinds_in(PROJECT / "tests" / "faults")),
        "numbers": dict(sorted(numbers_in(PROJECT / "tests" / "faults"))),
    }


def collected() -> list[str]:
    """Names of the tests of the long suites, by asking pytest for them."""
    options = ["--collect-only", "-o", "addopts=--strict-markers", "-q", "-m", "slurm or faults"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "tests/slurm", "tests/faults"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def kinds_in(folder: Path) -> set[str]:
    """The kinds of faults that a suite counts, as its source names them; what is filled in is a star."""
    kinds = set()
    for path in folder.glob("test_*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                nodes = list(ast.walk(function))
                named = {ast.unparse(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
                for node in nodes:
                    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tally.fault":
                        kinds |= patterns_of(named.get(ast.unparse(node.args[0]), node.args[0]))
    assert "*" not in kinds, "a kind of fault must be readable from the source"
    return kinds


def patterns_of(text: ast.expr) -> set[str]:
    if isinstance(text, ast.IfExp):
        return patterns_of(text.body) | patterns_of(text.orelse)
    if isinstance(text, ast.JoinedStr):
        return {"".join(part.value if isinstance(part, ast.Constant) else "*" for part in text.values)}
    return {text.value if isinstance(text, ast.Constant) else "*"}


NO_COUNTS = ("PAGE", "PATIENCE")
"""Whole numbers of the fault suite that do not say how often something is tried."""

COUNT = re.compile(r"range\((?:tries\()?(\d+)\)+")
"""A loop over so many tries; `tries` makes them fewer where no report is written."""


def numbers_in(folder: Path) -> Iterator[tuple[str, int]]:
    """How often a suite tries something: whole numbers that are named at the top of a file, and those of its loops."""
    for path in sorted(folder.glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign):
                names = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                for name, value in zip(names, values, strict=False):
                    counts = isinstance(value, ast.Constant) and type(value.value) is int
                    if counts and name.id not in NO_COUNTS:
                        yield f"{path.name}: {name.id}", value.value
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for loop in ast.walk(node):
                    if isinstance(loop, ast.For) and (times := COUNT.fullmatch(ast.unparse(loop.iter))):
                        yield f"{path.name}: {node.name}", int(times[1])


OWN_EXPORT = "h200_two_layers_nsys2025.3.sqlite"
RANGES = {
    OWN_EXPORT: ("inference", "training step", "backward", "optimizer", "inference/forward/block */ffn"),
    "train_fwd_bwd_rtx3070ti_nsys2025.1.3.sqlite": ("Run Benchmark", "Backward", "Forward", "Benchmark Forward Only"),
    "saxpy_duplicate_correlation_a100.sqlite": ("saxpy", "MPI_Send"),
    "cudagraph_modegraph_a100_nsys2024.6.2.sqlite": (),
}
"""The exports of Nsight Systems, and the ranges of each that are tabulated."""


def exports() -> Iterator[Path]:
    """The exports that are here: our own, and those of other programs."""
    shared = Path(os.environ.get("LMCORE_TEST_NSYS", PROJECT.parent / "shared" / "nsys_samples"))
    for name in RANGES:
        path = (PROJECT / "tests" / "data" if name == OWN_EXPORT else shared) / name
        if path.is_file():
            yield path


def nsys() -> dict[str, Any]:
    """For each export its ranges, and the tables of some of them as CSV; and what the command prints of it."""
    found = {}
    for path in exports():
        trace = library.read_export(path)
        ranges = trace.ranges.groupby("path", sort=False).size()
        tables = {}
        for name in RANGES[path.name]:
            for scope in ("process", "thread"):
                kernels = library.kernel_table(trace, name, scope)
                tables[f"{name}, {scope}"] = {
                    "kernels": csv(kernels.drop(columns="name").head(8)),
                    "all kernels": [len(kernels), *totals(kernels)],
                    "categories": csv(library.category_table(trace, name, scope)),
                    "busy": csv(library.busy_table(trace, name, scope).head(4)),
                    "copies": csv(library.copy_table(trace, name, scope)),
                }
        printed = {
            words: golden_commands.called(["nsys", "--report", str(path), *words.split("|")[1:]])[1].splitlines()
            for words in ("nsys --report", *(f"nsys --report|--range|{name}|--top|3" for name in RANGES[path.name][:2]))
        }
        found[path.name] = {
            "tool": trace.tool,
            "kernels": len(trace.kernels),
            "kernel nanoseconds": int(trace.kernels["duration"].sum()),
            "ranges": {name: int(count) for name, count in ranges.items()},
            "tables": tables,
            "printed": printed,
        }
    return found


def totals(kernels: Any) -> list[float]:
    """Sums of the numeric columns."""
    return [rounded(float(value), 6) for value in kernels.select_dtypes("number").sum()]


def memory() -> dict[str, Any]:
    """What is summed up of a snapshot and of the committed records of steps."""
    said = library.summary(library.history_of(snapshot()))
    keys = [key for key in said if key not in ("timeline", "allocations")]
    peaks = {
        path.name: peaks_of_timeline(json.loads(gzip.decompress(path.read_bytes())))
        for path in sorted((PROJECT / "results" / "h200" / "timelines").glob("memory_*.json.gz"))
    }
    return {"snapshot": rounded({key: said[key] for key in keys}, 9), "timelines": peaks}


def peaks_of_timeline(profile: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded step: its peak, by stage and by what the memory was for."""
    stages = {stage["name"]: [stage["peak_bytes"], stage["end_bytes"]] for stage in profile["stages"]}
    drawn = {key: len(value) for key, value in library.timeline_data(profile).items() if isinstance(value, list | dict)}
    return {"peak": profile["peak_bytes"], "stages": stages, "drawn": drawn}


def snapshot() -> dict[str, Any]:
    """A snapshot as PyTorch writes it: blocks that were there before, others that come, stay and go."""
    trace: list[dict[str, Any]] = []

    def entry(action: str, address: int, size: int, time: int, *lines: int) -> None:
        frames = [{"filename": "/a/program.py", "line": line, "name": f"f{line}"} for line in lines]
        trace.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": time, "frames": frames})

    entry("segment_alloc", 0x1000, 2_097_152, 5)
    for number in range(6):
        entry("alloc", 0x1000 + number * 0x1000, 1000 * (number + 1), 10 + 3 * number, number % 3, 7)
    for number in (1, 3, 4):
        for action in ("free_requested", "free_completed"):
            entry(action, 0x1000 + number * 0x1000, 1000 * (number + 1), 40 + number)
    entry("alloc", 0x2000, 512, 60, 9)
    blocks = [
        {"address": 0x100, "size": 1024, "requested_size": 900, "state": "active_allocated", "frames": []},
        {"address": 0x500, "size": 512, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    return {
        "device_traces": [trace],
        "segments": [{"device": 0, "address": 0x100, "total_size": 2048, "blocks": blocks}],
    }


def csv(table: Any) -> list[str]:
    """Lines of a table as CSV, numbers with six digits."""
    return table.map(lambda value: rounded(value, 6)).to_csv(index=False, float_format="%.6g").splitlines()


def rounded(value: Any, digits: int) -> Any:
    """Plain data with floats to so many significant digits."""
    if isinstance(value, Mapping):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return float(f"{value:.{digits}g}") if isinstance(value, float) and math.isfinite(value) else value


def refusals() -> dict[str, Any]:
    """Answers to bad input."""
    with tempfile.TemporaryDirectory() as folder:
        return golden_commands.refusals(Path(folder), PROJECT)


PARTS: dict[str, Callable[[], Any]] = {
    "architecture": architecture,
    "batches": batches,
    "corpora": corpora,
    "grammar": grammar,
    "memory": memory,
    "nsys": nsys,
    "options": golden_commands.all_options,
    "refusals": refusals,
    "signatures": signatures,
    "suites": suites,
    "tokenizers": tokenizers,
}
"""Name of a JSON file in this folder, and what computes its values."""


def committed(part: str) -> Any:
    """The values of a part as they were."""
    return json.loads((HERE / f"{part}.json").read_text(encoding="utf-8"))["values"]


def computed(part: str) -> Any:
    """The values of a part as they are, as JSON has them."""
    return json.loads(json.dumps(PARTS[part](), default=str))


def writers(source: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """For each part what writes its file, with the commit, the versions and the time."""
    notes = {key: source[key] for key in ("git_commit", "git_dirty", "time_utc", "python", "torch", "platform")}

    def write(part: str) -> None:
        text = json.dumps({"written_at": notes, "values": computed(part)}, indent=1, ensure_ascii=False)
        (HERE / f"{part}.json").write_text(text + "\n", encoding="utf-8")

    return {part: lambda part=part: write(part) for part in PARTS}
