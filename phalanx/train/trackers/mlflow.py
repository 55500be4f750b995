"""Metrics in MLflow, through a client of its own, so that `mlflow.start_run` stays the program's.

A run that is resumed in the same folder goes on in the same run there: its id is kept in the folder.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import mlflow
from mlflow.entities import Metric, Param

from phalanx.errors import MisuseError
from phalanx.train.trackers.identity import kept_identity
from phalanx.train.trackers.writer import Ending, Run

_OPTIONS = {"tracking_uri", "experiment", "run_name", "tags"}
_LONGEST_VALUE = 6000  # of a parameter, in MLflow
_MOST_PARAMETERS = 100  # in one request


class MLflow:
    """Writes to a run of its own. Options: tracking_uri, experiment, run_name, tags.

    Without a tracking URI, from the options or from MLflow's own settings, the run is in mlflow.db in its folder.
    """

    def __init__(self, run: Run) -> None:
        if unknown := set(run.options) - _OPTIONS:
            raise MisuseError(f"the mlflow tracker has no option {min(unknown)!r}", f"one of {sorted(_OPTIONS)}")
        uri = run.options.get("tracking_uri")
        if uri is None and not mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
            uri = f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._id = kept_identity(run.folder / "mlflow.id", lambda: self._new_run(run))
        self._client.set_terminated(self._id, "RUNNING")
        parameters = [Param(str(key), str(value)[:_LONGEST_VALUE]) for key, value in run.config.items()]
        known = self._client.get_run(self._id).data.params
        parameters = [each for each in parameters if each.key not in known]  # which MLflow lets nobody change
        for at in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[at : at + _MOST_PARAMETERS])

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log the values."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    def close(self, ending: Ending) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._id, ending.value.upper())

    def _new_run(self, run: Run) -> str:
        name = run.options.get("experiment", "Default")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        made = self._client.create_run(number, tags=run.options.get("tags"), run_name=run.options.get("run_name"))
        run_id: str = made.info.run_id
        return run_id


make = MLflow
