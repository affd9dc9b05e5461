//! Injects faults at random times, and ends them.

use std::rc::Rc;

use super::{
    net::{Link, RestartData},
    node::Mode,
    run::{Run, start_process},
    scenario::FaultKind,
    world::{MS, ProcessState, SEC, Sim, Time},
};

pub(crate) fn start(run: &Rc<Run>) {
    if run.scenario.fault_kinds.is_empty() {
        return;
    }
    schedule_next(run);
    schedule_saving(run);
}

fn schedule_next(run: &Rc<Run>) {
    let (run, sim) = (run.clone(), run.sim.clone());
    let pause = sim.between(0, 2 * run.scenario.fault_interval);
    sim.after(pause, move |sim| {
        if !run.fault_free.get() {
            let kind = run.scenario.fault_kinds
                [sim.rng.borrow_mut().usize(..run.scenario.fault_kinds.len())];
            inject(&run, kind);
            schedule_next(&run);
        }
    });
}

/// Saves the data of all servers to their disks at random times.
fn schedule_saving(run: &Rc<Run>) {
    let (run, sim) = (run.clone(), run.sim.clone());
    let pause = sim.between(50 * MS, SEC);
    sim.after(pause, move |sim| {
        for node in &mut sim.net.borrow_mut().servers {
            node.disk = node.fake.keys.clone();
        }
        if !run.fault_free.get() {
            schedule_saving(&run);
        }
    });
}

/// Length of a fault: often shorter than a lease, sometimes about as long, sometimes much longer.
fn random_length(run: &Run) -> Time {
    let ttl = run.scenario.ttl;
    match run.sim.between(0, 3) {
        0 => run.sim.between(MS, ttl / 3),
        1 => run.sim.between(ttl * 9 / 10, ttl * 12 / 10),
        2 => run.sim.between(MS, 2 * ttl),
        _ => run.sim.between(ttl, 4 * ttl),
    }
}

fn inject(run: &Rc<Run>, kind: FaultKind) {
    let (sim, length) = (&run.sim, random_length(run));
    let node = sim.rng.borrow_mut().usize(..run.scenario.nodes);
    let alive: Vec<_> = (0..sim.processes.borrow().len())
        .filter(|process| sim.process_state(*process) == ProcessState::Running)
        .collect();
    if alive.is_empty() {
        return;
    }
    let process = alive[sim.rng.borrow_mut().usize(..alive.len())];
    sim.log(|| format!("FAULT {kind:?}: process {process}, node {node}, {} ms", length / MS));
    let up = sim.net.borrow().servers[node].up;
    match kind {
        FaultKind::Pause => {
            sim.pause(process, ProcessState::Paused);
            sim.after(length, move |sim| sim.unpause(process));
        }
        FaultKind::Crash | FaultKind::PowerLoss => {
            sim.crash_process(process, kind == FaultKind::PowerLoss);
            let run = run.clone();
            run.pending_restarts.set(run.pending_restarts.get() + 1);
            sim.after(length, move |_| {
                run.pending_restarts.set(run.pending_restarts.get() - 1);
                start_process(&run);
            });
        }
        FaultKind::BreakConnections => {
            for connection in sim.connections_where(|of, to| of == process && to == node) {
                if sim.chance(700_000) {
                    sim.break_connection(connection);
                }
            }
        }
        FaultKind::Partition | FaultKind::OneWayPartition => {
            let both = kind == FaultKind::Partition;
            let requests = both || sim.chance(500_000);
            // The fault affects one process or all of them, and one node or all of them.
            let (all_nodes, all_processes) = (sim.chance(300_000), sim.chance(300_000));
            let processes = sim.processes.borrow().len();
            for of in 0..processes {
                for to in 0..run.scenario.nodes {
                    if (all_processes || of == process) && (all_nodes || to == node) {
                        let link = &mut sim.net.borrow_mut().links[of][to];
                        link.to_node_blocked |= requests;
                        link.to_client_blocked |= both || !requests;
                        sim.after(length, move |sim| sim.unblock(of, to));
                    }
                }
            }
        }
        FaultKind::SlowLink => {
            let max = sim.between(MS, run.scenario.ttl);
            let Link { min_delay, max_delay, .. } = run.scenario.link;
            let link = &mut sim.net.borrow_mut().links[process][node];
            (link.min_delay, link.max_delay) = (max / 2, max);
            sim.after(length, move |sim| {
                let link = &mut sim.net.borrow_mut().links[process][node];
                (link.min_delay, link.max_delay) = (min_delay, max_delay);
            });
        }
        FaultKind::StopNode if up => {
            sim.stop_node(node);
            sim.after(length, move |sim| {
                if sim.net.borrow().servers[node].up {
                    sim.continue_node(node);
                }
            });
        }
        FaultKind::RestartNode | FaultKind::ForgetfulNode | FaultKind::StaleNode if up => {
            let data = match kind {
                FaultKind::ForgetfulNode if !run.scenario.durable => RestartData::Empty,
                FaultKind::StaleNode if !run.scenario.durable => RestartData::Disk,
                _ => RestartData::Kept,
            };
            let power_loss = sim.chance(300_000);
            // One node alone. Or a quorum at once for a short time, so that locks are held whose
            // keys they lose.
            let quorum = sim.chance(400_000);
            let (count, length) = if quorum {
                (run.scenario.nodes / 2 + 1, sim.between(0, length / 20))
            } else {
                (1, length)
            };
            for node in (node..node + count).map(|node| node % run.scenario.nodes) {
                if sim.net.borrow().servers[node].up {
                    sim.crash_node(node, power_loss);
                    sim.after(length, move |sim| restart_if_down(sim, node, data));
                }
            }
        }
        FaultKind::FullNode | FaultKind::RefusingNode => {
            let refusing = if sim.chance(500_000) { Mode::Loading } else { Mode::ReadOnly };
            let mode = if kind == FaultKind::FullNode { Mode::Full } else { refusing };
            sim.net.borrow_mut().servers[node].fake.mode = mode;
            sim.after(length, move |sim| {
                sim.net.borrow_mut().servers[node].fake.mode = Mode::Normal
            });
        }
        FaultKind::FlushScripts => sim.net.borrow_mut().servers[node].fake.flush_scripts(),
        FaultKind::StopNode
        | FaultKind::RestartNode
        | FaultKind::ForgetfulNode
        | FaultKind::StaleNode => {}
    }
}

fn restart_if_down(sim: &Sim, node: usize, data: RestartData) {
    if !sim.net.borrow().servers[node].up {
        sim.log(|| format!("node {node} starts again; its data: {data:?}"));
        sim.start_node(node, data);
    }
}

/// Ends all faults.
pub(crate) fn end_all(run: &Rc<Run>) {
    let sim = &run.sim;
    sim.log(|| "ALL FAULTS END".into());
    sim.net.borrow_mut().breaks_per_million = 0;
    let processes = sim.processes.borrow().len();
    for process in 0..processes {
        for node in 0..run.scenario.nodes {
            {
                let link = &mut sim.net.borrow_mut().links[process][node];
                link.losses_per_million = 0;
                (link.min_delay, link.max_delay) =
                    (run.scenario.link.min_delay, run.scenario.link.max_delay);
            }
            sim.unblock(process, node);
        }
        sim.unpause(process);
    }
    for node in 0..run.scenario.nodes {
        sim.net.borrow_mut().servers[node].fake.mode = Mode::Normal;
        let data = if run.scenario.durable { RestartData::Kept } else { RestartData::Empty };
        restart_if_down(sim, node, data);
        sim.continue_node(node);
    }
}
