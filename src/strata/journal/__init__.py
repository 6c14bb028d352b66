"""The durable log of facts under the layers: streams, group commit, replay, snapshots, leader epochs."""
