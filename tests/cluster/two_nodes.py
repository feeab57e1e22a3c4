"""A Ray cluster of two simulated nodes, in a process that prints its address and does what it is told."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main(cpus: int) -> None:
    """`kill` ends the second node at once, `add` brings another, the end of the input ends all."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus})
    other = cluster.add_node(num_cpus=cpus)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(other, allow_graceful=False)
        else:
            other = cluster.add_node(num_cpus=cpus)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
