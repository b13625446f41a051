"""What every test needs before Ray is imported: the environment of a run on one node."""

from asyncrl.engine.lifecycle.environment import prepare

prepare(threads=1)
