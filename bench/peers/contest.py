"""Shared code of the peers' scripts: selection of rows, processes, and output.

    SCRIPT.py --like OURS.jsonl [--repeats 3] [--row-limit 120] [--only NAME]

Each script runs the works of brimful's rows in OURS.jsonl with its peer. Every measurement runs in a separate
process, so that one that fails, crashes or hangs does not affect the others: it becomes a row with its error.
Prints brimful's JSON: a line for each row as it comes, then one with all rows and the environment.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version


def run(bench, contestants, measure, works=None, package=None, facts=None):
    """Runs a script: all measurements in its first process, each of them in a further process.

    `contestants(work, flags)` returns the contestants of a work, each with its settings;
    `measure(work, settings, repeats)` returns a row's figures; `works(rows)` picks the works among our rows;
    `package` is the peer's, whose version goes into the environment, as do `facts`.
    """
    args = arguments()
    if args.row:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        task = json.loads(args.row)
        figures = measure(task["work"], task["settings"], args.repeats)
        print(json.dumps({"figures": figures, "environment": environment(task["work"], package, facts)}))
        return
    rows, where = [], None
    for work in (works or each_once)(ours(args.like, bench)):
        for name, settings in contestants(work, args.flags):
            if args.only.lower() not in name.lower():
                continue
            print(f"{name}: {title(work)}", file=sys.stderr, flush=True)
            answer = in_own_process({"work": work, "settings": settings}, args)
            where = where or answer.pop("environment", None)
            rows.append({"contestant": name, **identity(work), **answer.get("figures", answer)})
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    where = {"program": os.path.basename(sys.argv[0]), **(where or {})}
    print(json.dumps({"done": True, "environment": where, "rows": rows}, ensure_ascii=False))


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--like", help="JSON lines of brimful-bench")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps")
    parser.add_argument("--row-limit", type=float, default=120, help="seconds that one measurement may take")
    parser.add_argument("--only", default="", help="contestants that have this in their name, and no others")
    parser.add_argument("--flags", nargs="*", default=[], help="what a script takes besides")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args()


def ours(path, bench):
    """Returns our rows of one or several benchmarks, without those that failed."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.startswith("{")]
    return [row for row in rows if row.get("bench") in bench.split() and "error" not in row]


IDENTITY = ["bench", "model", "shape", "device", "dtype", "batch", "micro_batch", "micro_batches", "limit_bytes"]
IDENTITY += ["stages", "schedule", "recompute", "balance", "ranks"]
IDENTITY += ["heads", "sequences", "memory_limit"]
IDENTITY += ["data", "image", "workers"]
IDENTITY += ["sequence", "lora"]


def identity(work):
    return {key: work[key] for key in IDENTITY if key in work}


def each_once(rows):
    works = {}
    for row in rows:
        works.setdefault(json.dumps(identity(row)), identity(row))
    return works.values()


def title(work):
    keys = ["model", "shape", "dtype", "batch", "micro_batch", "micro_batches", "limit_bytes", "memory_limit"]
    keys += ["stages", "schedule", "recompute", "ranks", "lora"]
    return " ".join(str(work[key]) for key in keys if work.get(key) is not None)


def in_own_process(task, args):
    """Returns the result of a measurement's process, or its error."""
    command = [sys.executable, sys.argv[0], "--row", json.dumps(task), "--repeats", str(args.repeats)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, errors = process.communicate(timeout=args.row_limit)
        except subprocess.TimeoutExpired:
            end(process)
            return {"error": f"it took longer than {args.row_limit:.0f} s"}
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1])
    sys.stderr.write(errors)
    return {"error": reason(errors) or f"its process ended with {process.returncode}"}


def end(process):
    """Terminates a process and first its ranks, which would otherwise disturb the next measurements."""
    process.terminate()
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()


def reason(text):
    """Returns the last line that names an exception, else the last line, truncated."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return next(iter(named[-1:] or lines[-1:]), "")[:200]


def timed(step, clear, wait, repeats, warm_up=2):
    """Returns the seconds of warm-up steps and of measured steps, each from idle devices to idle devices."""
    seconds = []
    for _ in range(warm_up + repeats):
        clear()
        wait()
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds[:warm_up], seconds[warm_up:]


def speed(work, warm_up, seconds):
    median = statistics.median(seconds)
    return {
        "samples_per_s": work["batch"] / median, "spread": (max(seconds) - min(seconds)) / median,
        "seconds": seconds, "warm_up_seconds": warm_up,
    }  # fmt: skip


def in_ranks(count, run, row, repeats):
    """Runs `run(row, repeats, rank)` in `count` single-threaded processes joined by Gloo; returns the first one's result."""
    from torch import multiprocessing

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, run, row, repeats, os.path.join(folder, "store"), answers)
        children = [context.Process(target=as_rank, args=(rank, *arguments), daemon=True) for rank in range(count)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    codes = [child.exitcode for child in children]
    if any(codes):
        raise RuntimeError(f"the ranks' processes ended with {codes}")
    return answers.get()


def as_rank(rank, count, run, row, repeats, store, answers):
    """Runs a forked child: the libraries are loaded already, and no thread has been started."""
    import torch
    from torch import distributed

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    answer = run(row, repeats, rank)
    if rank == 0:
        answers.put(answer)
    distributed.barrier()
    distributed.destroy_process_group()


def synchronize(device):
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def environment(work, package, facts):
    import torch
    import torchvision

    cuda = work["device"].startswith("cuda")
    return {
        "python": sys.version.split()[0], "torch": torch.__version__,
        "torchvision": torchvision.__version__, **({package: version(package)} if package else {}), "device": work["device"],
        "device_model": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        "optimizer": "none", "batch_norm": "per micro-batch", **(facts or {}),
    }  # fmt: skip
