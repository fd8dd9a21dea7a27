"""The test cluster does what a real one does: the facts that the job scripts and `workbook submit` build on."""

import re

import pytest

pytestmark = pytest.mark.slurm


def batch(*lines: str) -> str:
    """A batch script of these lines."""
    return "\n".join(["#!/bin/bash", "#SBATCH --output=%x-%j.log", "#SBATCH --open-mode=append", *lines]) + "\n"


def test_a_job_runs_on_the_node_that_it_asks_for(cluster):
    job = cluster.sbatch(
        batch('echo "on $SLURMD_NODENAME with $1 and $WORD"'), "argument", options=["-w", "n2"], WORD="w"
    )
    assert cluster.wait(job) == "COMPLETED"
    assert cluster.log(job) == "on n2 with argument and w\n"
    assert cluster.info(job)["NodeList"] == "n2"


def test_a_failing_job_has_failed_and_keeps_its_exit_code(cluster):
    job = cluster.sbatch(batch("exit 3"))
    assert cluster.wait(job) == "FAILED"
    assert cluster.info(job)["ExitCode"] == "3:0"
    with pytest.raises(AssertionError, match=rf"job {job} is FAILED, not RUNNING"):
        cluster.wait(job, "RUNNING")


def test_an_array_never_runs_more_tasks_than_its_cap(cluster, tmp_path):
    """Each task counts the tasks that run beside it by their files, which they take away before they end."""
    count = "find . -name 'running-*' | wc -l >> counts"
    mine = '"running-$SLURM_ARRAY_TASK_ID"'
    script = batch(f"touch {mine}", count, "sleep 1", count, f"rm {mine}")
    path = tmp_path / "array.sh"
    path.write_text(script)
    job = cluster.sbatch(path, options=["--array=0-5%2"], cwd=tmp_path)
    assert cluster.wait(job) == "COMPLETED"
    assert len(cluster.records(job)) == 6
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert len(counts) == 12
    assert max(counts) == 2


def test_each_job_sees_the_gpu_that_it_asked_for(cluster):
    script = batch('echo "gpu <$CUDA_VISIBLE_DEVICES>"', "sleep 2")
    first, second = (cluster.sbatch(script, options=["-w", "n1", "--gres=gpu:1"]) for _ in range(2))
    none = cluster.sbatch(script, options=["-w", "n1"])
    assert [cluster.wait(job) for job in (first, second, none)] == ["COMPLETED"] * 3
    assert {cluster.log(first), cluster.log(second)} == {"gpu <0>\n", "gpu <1>\n"}
    assert cluster.log(none) == "gpu <>\n"


def test_usr1_reaches_the_batch_shell_alone(cluster):
    """What `--signal=B:USR1@120` does, delivered at a moment of the test's choice."""
    child = "python3 -c 'import time; time.sleep(60)' & child=$!"  # has no handler: the signal would end it
    trap = "trap 'echo caught; kill -0 $child && echo child lives; kill $child; exit 0' USR1"
    job = cluster.sbatch(batch(child, trap, "echo ready", "wait"))
    cluster.wait_until(lambda: "ready" in cluster.log(job), "the trap is set", job=job)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job) == "COMPLETED"
    assert cluster.log(job) == "ready\ncaught\nchild lives\n"


def test_a_running_job_is_requeued_in_seconds(cluster):
    lines = ['echo "start ${SLURM_RESTART_COUNT:-0} of $SLURM_JOB_ID"', '[ "$SLURM_RESTART_COUNT" ] || sleep 60']
    job = cluster.sbatch(batch(*lines))
    cluster.wait_until(lambda: "start 0" in cluster.log(job), "the job has started", job=job)
    cluster.run("scontrol", "requeue", job)
    assert cluster.wait(job, timeout=40) == "COMPLETED"  # without a short cred_expire it would wait for two minutes
    assert re.findall(r"start (\d) of (\d+)", cluster.log(job)) == [("0", job), ("1", job)]
    assert cluster.info(job)["Restarts"] == "1"


def test_a_job_may_requeue_itself(cluster):
    again = '[ "$SLURM_RESTART_COUNT" ] && echo again && exit 0'
    job = cluster.sbatch(batch(again, 'scontrol requeue "$SLURM_JOB_ID"'))
    cluster.wait_until(lambda: "again" in cluster.log(job), "the job runs again", job=job)
    assert cluster.wait(job) == "COMPLETED"


def test_main_preempts_spot_which_is_warned_and_requeued(cluster):
    """The preempted job gets its `--signal` at once, not its time limit's moment, and runs again on a free node."""
    lines = ['[ "$SLURM_RESTART_COUNT" ] && echo again && exit 0', "sleep 100 & trap 'echo warned; kill $!' USR1"]
    options = ["-p", "spot", "-w", "n3", "--exclusive", "--signal=B:USR1@120", "--time=60"]
    spot = cluster.sbatch(batch(*lines, "echo ready", "wait", 'scontrol requeue "$SLURM_JOB_ID"'), options=options)
    cluster.wait_until(lambda: "ready" in cluster.log(spot), "the job of spot has started", job=spot)
    main = cluster.sbatch(batch("echo main"), options=["-w", "n3", "--exclusive"])
    assert cluster.wait(main) == "COMPLETED"
    assert cluster.wait(spot) == "COMPLETED"
    assert cluster.info(spot)["Restarts"] == "1"
    assert "ready" in cluster.log(spot)
    assert "warned" in cluster.log(spot)
    assert cluster.log(spot).endswith("again\n")


def test_a_job_of_a_dead_node_runs_again_on_another(cluster):
    lines = ['echo "on $SLURMD_NODENAME"', '[ "$SLURM_RESTART_COUNT" ] || sleep 100', "echo finished"]
    job = cluster.sbatch(batch(*lines), options=["--exclude=n2,n3"])
    cluster.wait_until(lambda: "on n1" in cluster.log(job), "the job runs on n1", job=job)
    cluster.kill_node("n1")
    try:
        cluster.wait_until(lambda: cluster.node_state("n1").startswith("DOWN"), "n1 is down", job=job)
        cluster.wait(job, "PENDING")
        cluster.run("scontrol", "update", f"JobId={job}", "ExcNodeList=")
        assert cluster.wait(job) == "COMPLETED"
        assert re.fullmatch(r"on n1\n[^\0]*on n[23]\nfinished\n", cluster.log(job))
    finally:
        cluster.start_node("n1")
    back = cluster.sbatch(batch('echo "$SLURMD_NODENAME"'), options=["-w", "n1"])
    assert cluster.wait(back) == "COMPLETED"
    assert cluster.log(back) == "n1\n"


def test_after_a_failed_job_afterok_is_cancelled_and_afterany_runs(cluster):
    failing = cluster.sbatch(batch("sleep 2", "exit 1"))
    refused, waits_for_ever, runs = (
        cluster.sbatch(batch("echo ran"), options=options)
        for options in (
            [f"--dependency=afterok:{failing}", "--kill-on-invalid-dep=yes"],
            [f"--dependency=afterok:{failing}"],
            [f"--dependency=afterany:{failing}"],
        )
    )
    assert cluster.wait(failing) == "FAILED"
    assert cluster.wait(runs) == "COMPLETED"
    assert cluster.log(runs) == "ran\n"
    assert cluster.wait(refused) == "CANCELLED"
    assert cluster.log(refused) == ""
    cluster.wait_until(lambda: cluster.info(waits_for_ever)["Reason"] == "DependencyNeverSatisfied", "it is hopeless")
    assert cluster.state(waits_for_ever) == "PENDING"
    cluster.run("scancel", waits_for_ever)
    assert cluster.wait(waits_for_ever) == "CANCELLED"
