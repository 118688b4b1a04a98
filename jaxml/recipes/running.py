"""The moving part of a run: starts or restores the state, acts on each step's event, saves, evaluates, rewinds.

Reads `train.loop` for the events, and `saving`, `evaluate`, `guarding`, `announce` for what to do about them;
`recipes.train` owns it. Of several processes the first one keeps the files; what it reads there all are told, so that
every process decides the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxml.checkpoint.store import CheckpointStore
from jaxml.config.spec import suggest
from jaxml.data.loader import Loader
from jaxml.devices.processes import Processes
from jaxml.errors import ConfigError, JaxmlError, RunError
from jaxml.observe.metrics_log import MetricsLog, read_metrics
from jaxml.observe.progress import Progress, Stream
from jaxml.observe.summary import summarize
from jaxml.observe.tensorboard import TensorBoardLog
from jaxml.recipes.announce import model_flop_utilisation, run_facts
from jaxml.recipes.assemble import Assembly
from jaxml.recipes.evaluate import evaluate
from jaxml.recipes.guarding import Guard, GuardEvent, left_out
from jaxml.recipes.reporting import write_report
from jaxml.recipes.run_directory import Origin, RunDirectory, StartMode
from jaxml.recipes.saving import Saver, take_parts
from jaxml.telemetry import WallClock
from jaxml.train.loop import StepEvent, run_steps

State = dict[str, Any]


class Run:
    """One process's share of a run. `metrics`: the newest loss and evaluation. `log`, `board`: only the first process
    has one."""

    def __init__(
        self,
        assembly: Assembly,
        directory: RunDirectory,
        store: CheckpointStore,
        saver: Saver,
        clock: WallClock,
        processes: Processes,
        stream: Stream,
    ):
        self.assembly, self.directory, self.store, self.saver = assembly, directory, store, saver
        self.clock, self.processes, self.stream = clock, processes, stream
        self.experiment, self.program = assembly.experiment, assembly.program
        self.log = MetricsLog(directory.metrics) if processes.is_first else None
        self.guard = Guard(assembly, directory.faults, writes=processes.is_first)
        self.board: TensorBoardLog | None = None
        self.metrics: dict[str, float] = {}
        self.saved_step = -1
        self.stalled_s = 0.0  # how long the last save held up the step after it
        self.has_started = False

    def to_the_end(
        self, start: StartMode, origin: Origin | None, tensorboard: bool, prompts: Sequence[str] = ()
    ) -> tuple[str, int]:
        """(status, step): runs to the last step, or to a signal, with rewinds in between; `prompts` are for the report."""
        self.origin = origin
        state, skipped, how = self._start(start)
        step = first_step = int(state["step"])
        if tensorboard and self.processes.is_first:
            self.board = TensorBoardLog(self.directory.path / "tensorboard", last_step=step)
        with self.clock.span("compile"):
            # Ahead of the first step, so that the announcement can tell what the compiler planned.
            self.program.compile(self.assembly.train_batches(skipped).batch(step))
        self.facts = run_facts(self.assembly, how)
        for name, value in self.facts.items():
            print(f"{name:>16}: {value}", file=self.stream, flush=True)
        if step > 0:
            self.clock.mark_restarted()
        self.has_started = True
        while True:
            self._forget_after(int(state["step"]))
            outcome = self._steps(state, skipped)
            if not isinstance(outcome, GuardEvent):
                break
            state, skipped = self._rewind(outcome)
        status, step = outcome
        with self.clock.span("checkpoint"):
            self.store.wait()
        if self.processes.is_first:
            events = [how] * (first_step > 0) + [str(event) for event in self.guard.events]
            # A signal leaves no time for samples: they have to be compiled.
            self._report(events, prompts if status == "finished" else ())
        return status, step

    def _report(self, events: list[str], prompts: Sequence[str]) -> None:
        """The last words, and report.html."""
        verdict = summarize(read_metrics(self.directory.metrics), self.clock.summary()).verdict
        print(f"jaxml: {verdict}", file=self.stream)
        if prompts and self.processes.count > 1:
            print("jaxml: no samples: one of several processes opens no model; use `jaxml generate`", file=self.stream)
            prompts = ()
        try:
            write_report(self.assembly, self.directory, self.facts, self.clock, events, prompts)
        except JaxmlError as refused:
            print(f"jaxml: {refused}", file=self.stream)  # the run itself is complete and saved

    def close(self) -> None:
        """Flush and close what is open."""
        if self.log is not None:
            self.log.close()
        if self.board is not None:
            self.board.close()

    def _start(self, start: StartMode) -> tuple[State, tuple[int, ...], str]:
        for step, fault in self.store.damaged().items():
            print(f"jaxml: the checkpoint of step {step} is left aside: {fault}", file=self.stream, flush=True)
        latest = self.processes.from_first(self.store.latest_step) if start in ("resume", "must-resume") else None
        if latest is not None:
            self._refuse_beyond_the_end(latest, "the step of the newest checkpoint")
            with self.clock.span("restart"):
                return *self._restore(latest), f"{start}: at step {latest}"
        found_none = " (no complete checkpoint was found)" if start == "resume" else ""
        taken = f", {' and '.join(self.origin.parts)} of {self.origin.path}" if self.origin else ""
        state, skipped = self._first_state()
        return state, skipped, f"{start}: at step {int(state['step'])}{found_none}{taken}"

    def _first_state(self) -> tuple[State, tuple[int, ...]]:
        """(state, data steps to leave out) at the start: drawn from the seed, or with parts of another checkpoint."""
        with self.clock.span("compile"):
            state = self.program.init(self.experiment.train.seed)
        skipped: tuple[int, ...] = ()
        if self.origin is not None:
            state, skipped = take_parts(self.assembly, state, self.origin)
            self._refuse_beyond_the_end(int(state["step"]), f"the step taken from {self.origin.path}")
        return state, tuple(sorted({*skipped, *left_out(self.guard.events)}))

    def _refuse_beyond_the_end(self, step: int, what: str) -> None:
        if step > self.experiment.train.steps:
            raise RunError(
                "train.steps",
                expected=f"at least {step}, {what}",
                got=str(self.experiment.train.steps),
                todo=f"pass --train.steps {step} or more",
            )

    def _restore(self, step: int) -> tuple[State, tuple[int, ...]]:
        state, skipped = self.saver.restore(step)
        self.saved_step = step
        return state, tuple(sorted({*skipped, *left_out(self.guard.events)}))

    def _forget_after(self, step: int) -> None:
        """Later metrics belong to steps that will be taken again: curves neither fork nor repeat."""
        if self.board is not None:
            self.board.truncate(step)
        self.guard.restore(self.processes.from_first(lambda: self._kept_losses(step)))

    def _kept_losses(self, step: int) -> list[dict[str, Any]]:
        """Drop the metrics after `step`; what is kept, as far as the guard looks back."""
        assert self.log is not None
        self.log.truncate(step)
        good = [record for record in read_metrics(self.directory.metrics) if record.get("is_finite")]
        return [{"is_finite": True, "loss": record.get("loss")} for record in good[-self.guard.spec.spike_window :]]

    def _steps(self, state: State, skipped: tuple[int, ...]) -> tuple[str, int] | GuardEvent:
        """Steps from `state` on: ("finished" or "interrupted", step), or the guard's wish to go back."""
        first_step, last_step = int(state["step"]), self.experiment.train.steps
        self._catch_up(state)
        step = first_step
        with (
            Loader(self.assembly.train_batches(skipped), first_step, self.experiment.data.prefetch) as loader,
            Progress(last_step, first_step, self.stream) as progress,
        ):
            should_stop = self.processes.should_stop
            for event in run_steps(self.program, state, loader, first_step, last_step, self._holds, should_stop):
                self.clock.add("data_wait", event.data_wait_s)
                self.clock.add("step", event.step_s)
                self.store.check()
                verdict = self.guard.judge(event, skipped)
                if verdict is not None:
                    return verdict
                self._after_step(event, skipped, progress)
                # The held state stays valid when the loop stops after it: that is what an interruption saves.
                step, state = event.step, event.state if event.state is not None else state
        if step < last_step:
            self._save(state, skipped)
            return "interrupted", step
        # A signal may have cut the last evaluation short; a resumed run then makes up for it.
        return "interrupted" if self.processes.should_stop() else "finished", step

    def _catch_up(self, state: State) -> None:
        """Measure what the last process was stopped from measuring at its last step, and complete that step's line."""
        step = int(state["step"])
        line = self._logged(step)
        if step > 0 and self._evaluates_at(step) and "eval_loss" not in line:
            line |= self._evaluate(state)
            if self.log is not None:
                self.log.amend(step, line)
            if self.board is not None:
                self.board.write(step, line)
        self.metrics |= {name: value for name, value in line.items() if name == "loss" or name.startswith("eval_")}

    def _logged(self, step: int) -> dict[str, Any]:
        """What metrics.jsonl says about a step."""

        def read() -> dict[str, Any]:
            found = (record for record in reversed(read_metrics(self.directory.metrics)) if record["step"] == step)
            return next(found, {"step": step})

        return self.processes.from_first(read)

    def _evaluate(self, state: State) -> dict[str, float]:
        """The held-out metrics of a state; empty when a signal cut it short."""
        with self.clock.span("compile"):
            self.program.eval_step.compile(self.assembly.eval_batches().batch(0))
        with self.clock.span("eval"):
            params = self.program.eval_params(state)
            measured = evaluate(self.assembly, params, self.processes.should_stop) or {}
        best = self.experiment.checkpoint.best_metric
        if measured and self.experiment.checkpoint.keep_best and best not in measured:
            known = [*measured, "loss"]
            raise ConfigError(
                "checkpoint.best_metric", expected="a metric of this run", got=best, todo=suggest(best, known)
            )
        self.metrics |= measured
        return measured

    def _holds(self, step: int) -> bool:
        return self._evaluates_at(step) or self._saves_at(step)

    def _evaluates_at(self, step: int) -> bool:
        train = self.experiment.train
        return step == train.steps or (train.eval_every > 0 and step % train.eval_every == 0)

    def _saves_at(self, step: int) -> bool:
        return step == self.experiment.train.steps or step % self.experiment.checkpoint.every == 0

    def _after_step(self, event: StepEvent, skipped: tuple[int, ...], progress: Progress) -> None:
        """Evaluate where it is time, write the step's one line, then save: a saved step is never without its line."""
        line = {name: value for name, value in event.metrics.items() if name != "leaf_grad_norms"}
        seconds = event.step_s + event.data_wait_s
        line |= {"data_wait_s": event.data_wait_s, "step_s": event.step_s, "checkpoint_s": self.stalled_s}
        self.stalled_s = 0.0
        if seconds > 0:
            line["tokens_per_s"] = event.metrics["num_tokens"] / seconds
            line |= self._utilisation(line["tokens_per_s"])
        self.metrics["loss"] = event.metrics["loss"]
        if event.state is not None and self._evaluates_at(event.step):
            line |= self._evaluate(event.state)
        if self.log is not None:
            self.log.write(event.step, line)
        if self.board is not None:
            self.board.write(event.step, line)
        progress.write(event.step, line)
        if event.state is not None and self._saves_at(event.step):
            self.stalled_s = self._save(event.state, skipped, line)
        if event.state is not None and self._evaluates_at(event.step):
            progress.note(
                f"step {event.step}: {', '.join(f'{n} {v:.4f}' for n, v in line.items() if n.startswith('eval_'))}"
            )

    def _utilisation(self, tokens_per_s: float) -> dict[str, float]:
        kind = self.assembly.mesh.devices.flat[0].device_kind
        mfu = model_flop_utilisation(self.experiment, tokens_per_s, kind, self.assembly.mesh.size)
        return {} if mfu is None else {"mfu": mfu}

    def _save(self, state: State, skipped: tuple[int, ...], line: Mapping[str, Any] | None = None) -> float:
        """Save, unless this very step is saved already; returns the seconds for which training stood still.

        The manifest's metrics are those measured at this step: from its line, or from the log.
        """
        step = int(state["step"])
        if step == self.saved_step:
            return 0.0
        begun = time.perf_counter()
        if line is None:
            line = self._logged(step)
        metrics = {name: value for name, value in line.items() if name == "loss" or name.startswith("eval_")}
        with self.clock.span("compile"):
            self.saver.compile(state)
        with self.clock.span("checkpoint"):
            self.saver.save(state, skipped, metrics)
        if self.board is not None:
            self.board.flush()
        self.saved_step = step
        return time.perf_counter() - begun

    def _rewind(self, verdict: GuardEvent) -> tuple[State, tuple[int, ...]]:
        """The state of the newest checkpoint, and the data steps to leave out from there on; step 0 where there is none."""
        print(f"jaxml: {verdict}", file=self.stream, flush=True)
        self.metrics = {}
        with self.clock.span("restart"):
            self.store.wait()
            latest = self.processes.from_first(self.store.latest_step)
            self.store.discard_after(latest or 0)
            if latest is not None:
                return self._restore(latest)
            self.saved_step = -1
            return self._first_state()
