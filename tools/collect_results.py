"""Writes one CSV row per run directory, for results/: python tools/collect_results.py OUT.csv DIR..."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from engram.files import read_json

COLUMNS = (
    *("recipe", "order", "seed", "stages", "cnn_average", "cnn_final", "nme_average", "nme_final"),
    *("cnn_forgetting", "cnn_backward_transfer", "seconds", "device", "torch", "engram", "config_hash", "commit"),
)


def row(directory: Path) -> dict[str, object]:
    """The numbers of one run, and where they came from."""
    run, result = read_json(directory / "run.json"), read_json(directory / "result.json")
    average, final = result["average_incremental_accuracy"], result["final_accuracy"]
    return {
        "recipe": result["recipe"],
        "order": result["order"],
        "seed": result["seed"],
        "stages": len(result["stages"]) - 1,
        "cnn_average": average["cnn"],
        "cnn_final": final["cnn"],
        "nme_average": average.get("nme", ""),
        "nme_final": final.get("nme", ""),
        "cnn_forgetting": result["forgetting"]["cnn"],
        "cnn_backward_transfer": result["backward_transfer"]["cnn"],
        "seconds": round(result["seconds"], 1),
        "device": f"{run['hardware']['device']} {run['hardware']['name']} {run['hardware']['cores']} cores",
        "torch": run["versions"]["torch"],
        "engram": run["engram"],
        "config_hash": run["config_hash"],
        "commit": run["versions"].get("commit", ""),
    }


def main() -> None:
    """Collects the runs named on the command line."""
    out, directories = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row(directory) for directory in directories)


if __name__ == "__main__":
    main()
