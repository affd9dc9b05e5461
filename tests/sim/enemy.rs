//! What goes wrong, and what puts it right again.

use std::rc::Rc;

use super::{
    net::{Link, Memory},
    node::Mode,
    plan::Kind,
    story::start_process,
    user::Stage,
    world::{Life, MS, SEC, Sim, Time},
};

pub(crate) fn begin(stage: &Rc<Stage>) {
    if stage.plan.kinds.is_empty() {
        return;
    }
    next(stage);
    write_down(stage);
}

fn next(stage: &Rc<Stage>) {
    let (stage, sim) = (stage.clone(), stage.sim.clone());
    let pause = sim.between(0, 2 * stage.plan.fault_every);
    sim.after(pause, move |sim| {
        if !stage.calm.get() {
            let kind = stage.plan.kinds[sim.rng.borrow_mut().usize(..stage.plan.kinds.len())];
            strike(&stage, kind);
            next(&stage);
        }
    });
}

/// Now and then a server writes down what it has.
fn write_down(stage: &Rc<Stage>) {
    let (stage, sim) = (stage.clone(), stage.sim.clone());
    let pause = sim.between(50 * MS, SEC);
    sim.after(pause, move |sim| {
        for node in &mut sim.net.borrow_mut().servers {
            node.disk = node.fake.keys.clone();
        }
        if !stage.calm.get() {
            write_down(&stage);
        }
    });
}

/// How long something lasts: often shorter than a lease, sometimes about as long, sometimes much longer.
fn lasting(stage: &Stage) -> Time {
    let ttl = stage.plan.ttl;
    match stage.sim.between(0, 3) {
        0 => stage.sim.between(MS, ttl / 3),
        1 => stage.sim.between(ttl * 9 / 10, ttl * 12 / 10),
        2 => stage.sim.between(MS, 2 * ttl),
        _ => stage.sim.between(ttl, 4 * ttl),
    }
}

fn strike(stage: &Rc<Stage>, kind: Kind) {
    let (sim, lasts) = (&stage.sim, lasting(stage));
    let node = sim.rng.borrow_mut().usize(..stage.plan.nodes);
    let alive: Vec<_> = (0..sim.processes.borrow().len()).filter(|process| sim.life(*process) == Life::Runs).collect();
    if alive.is_empty() {
        return;
    }
    let process = alive[sim.rng.borrow_mut().usize(..alive.len())];
    sim.say(|| format!("FAULT {kind:?}: process {process}, node {node}, {} ms", lasts / MS));
    let up = sim.net.borrow().servers[node].up;
    match kind {
        Kind::Pause => {
            sim.pause(process, Life::Paused);
            sim.after(lasts, move |sim| sim.unpause(process));
        }
        Kind::Crash | Kind::LosePower => {
            sim.abandon(process, kind == Kind::LosePower);
            let stage = stage.clone();
            stage.coming.set(stage.coming.get() + 1);
            sim.after(lasts, move |_| {
                stage.coming.set(stage.coming.get() - 1);
                start_process(&stage);
            });
        }
        Kind::Break => {
            for connection in sim.connections_of(|of, to| of == process && to == node) {
                if sim.chance(700_000) {
                    sim.break_off(connection);
                }
            }
        }
        Kind::Partition | Kind::OneWay => {
            let both = kind == Kind::Partition;
            let out = both || sim.chance(500_000);
            // Between one process and one node, or all of either.
            let (every_node, every_process) = (sim.chance(300_000), sim.chance(300_000));
            let processes = sim.processes.borrow().len();
            for of in 0..processes {
                for to in 0..stage.plan.nodes {
                    if (every_process || of == process) && (every_node || to == node) {
                        let link = &mut sim.net.borrow_mut().links[of][to];
                        link.out_blocked |= out;
                        link.back_blocked |= both || !out;
                        sim.after(lasts, move |sim| sim.unblock(of, to));
                    }
                }
            }
        }
        Kind::Slow => {
            let slow = sim.between(MS, stage.plan.ttl);
            let Link { least, most, .. } = stage.plan.link;
            let link = &mut sim.net.borrow_mut().links[process][node];
            (link.least, link.most) = (slow / 2, slow);
            sim.after(lasts, move |sim| {
                let link = &mut sim.net.borrow_mut().links[process][node];
                (link.least, link.most) = (least, most);
            });
        }
        Kind::StopNode if up => {
            sim.stop_node(node);
            sim.after(lasts, move |sim| {
                if sim.net.borrow().servers[node].up {
                    sim.continue_node(node);
                }
            });
        }
        Kind::RestartNode | Kind::ForgetfulNode | Kind::StaleNode if up => {
            let durable = sim.net.borrow().servers[node].fake.durable;
            let memory = match kind {
                Kind::ForgetfulNode => Memory::Empty,
                Kind::StaleNode if !durable => Memory::Disk,
                _ => Memory::Kept,
            };
            let system_too = sim.chance(300_000);
            // Alone, or most of them at once and only for a moment: what they forget is then in use.
            let many = sim.chance(400_000);
            let (count, lasts) = if many { (stage.plan.nodes / 2 + 1, sim.between(0, lasts / 20)) } else { (1, lasts) };
            for node in (node..node + count).map(|node| node % stage.plan.nodes) {
                if sim.net.borrow().servers[node].up {
                    sim.kill_node(node, system_too);
                    sim.after(lasts, move |sim| back(sim, node, memory));
                }
            }
        }
        Kind::FullNode | Kind::NodeRefuses => {
            let refusing = if sim.chance(500_000) { Mode::Loading } else { Mode::Misconfigured };
            let mode = if kind == Kind::FullNode { Mode::Full } else { refusing };
            sim.net.borrow_mut().servers[node].fake.mode = mode;
            sim.after(lasts, move |sim| sim.net.borrow_mut().servers[node].fake.mode = Mode::Well);
        }
        Kind::ForgetScripts => sim.net.borrow_mut().servers[node].fake.forget_scripts(),
        Kind::StopNode | Kind::RestartNode | Kind::ForgetfulNode | Kind::StaleNode => {}
    }
}

fn back(sim: &Sim, node: usize, memory: Memory) {
    if !sim.net.borrow().servers[node].up {
        sim.say(|| format!("node {node} comes back: {memory:?}"));
        sim.start_node(node, memory);
    }
}

/// Everything is well again.
pub(crate) fn end(stage: &Rc<Stage>) {
    let sim = &stage.sim;
    sim.say(|| "ALL IS WELL AGAIN".into());
    sim.net.borrow_mut().breaks = 0;
    let processes = sim.processes.borrow().len();
    for process in 0..processes {
        for node in 0..stage.plan.nodes {
            {
                let link = &mut sim.net.borrow_mut().links[process][node];
                link.loses = 0;
                (link.least, link.most) = (stage.plan.link.least, stage.plan.link.most);
            }
            sim.unblock(process, node);
        }
        sim.unpause(process);
    }
    for node in 0..stage.plan.nodes {
        sim.net.borrow_mut().servers[node].fake.mode = Mode::Well;
        let durable = sim.net.borrow().servers[node].fake.durable;
        back(sim, node, if durable { Memory::Kept } else { Memory::Empty });
        sim.continue_node(node);
    }
}
