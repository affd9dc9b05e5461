//! One run: processes use locks while things go wrong; then everything is well again, and everybody has to get on.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
};

use super::{
    enemy,
    judge::Judge,
    net::{Link, Server},
    node::FakeNode,
    plan::Plan,
    user::{Ear, Stage, User, begin},
    world::{Clock, Life, MS, SEC, Sim, Stalls, Time, live_in},
};

/// How a run went.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) wrong: Vec<String>,
    pub(crate) digest: u64,
    pub(crate) steps: u64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

/// Runs a seed; `change` may make another plan of the one that the seed stands for.
pub(crate) fn run(seed: u64, trace: bool, change: impl FnOnce(&mut Plan)) -> Report {
    let sim = Sim::new(seed, trace);
    let mut plan = Plan::new(&mut sim.rng.borrow_mut());
    change(&mut plan);
    sim.say(|| format!("{plan:#?}"));
    live_in(Some(sim.clone()));
    let judge = Judge::default();
    // Two nodes cannot spare one, and have no quarantine.
    judge.forgetting_is_excused.set(plan.nodes < 3);
    let stage = Rc::new(Stage {
        sim: sim.clone(),
        judge,
        plan,
        calm: Cell::new(false),
        users: RefCell::default(),
        coming: Cell::new(0),
        ears: RefCell::default(),
    });
    set_up(&stage);
    play(&stage);
    let report = Report {
        wrong: sim.faults_found(),
        digest: sim.digest(),
        steps: sim.steps(),
        counts: stage.judge.count.borrow().clone(),
    };
    // What is dropped here still lives in the world.
    stage.judge.beliefs.borrow_mut().clear();
    drop(stage);
    live_in(None);
    report
}

pub(crate) fn set_up(stage: &Rc<Stage>) {
    let (sim, plan) = (&stage.sim, &stage.plan);
    let rate = || sim.between(0, 2 * plan.ppm as Time) as i64 - plan.ppm;
    for _ in 0..plan.nodes {
        // The clocks of nodes agree, but not exactly.
        let base = 1_700_000_000 * SEC + sim.between(0, 50 * MS);
        let clock = Clock { base, ppm: rate() };
        let mut fake = FakeNode::default();
        (fake.durable, fake.flaw) = (plan.durable, plan.flaw);
        // It has been up for long.
        (fake.run, fake.up_since_us) = (sim.rng.borrow_mut().u64(..), clock.at(0) / 1_000 - 1_000_000_000);
        let (amnesia, disk) = (Vec::new(), Default::default());
        let server = Server { fake, clock, up: true, stopped: false, began: 0, amnesia, disk, served: 0 };
        sim.net.borrow_mut().servers.push(server);
    }
    sim.net.borrow_mut().breaks = plan.breaks;
    let mut calm = sim.calm.borrow_mut();
    calm.usual = plan.link.most.max(Link::default().most);
    calm.quarantine = if plan.nodes < 3 { 0 } else { plan.ttl };
    sim.stalls.set(plan.stalls);
}

/// A process of its own clock, with its users.
pub(crate) fn start_process(stage: &Rc<Stage>) {
    let (sim, plan) = (&stage.sim, &stage.plan);
    let ppm = sim.between(0, 2 * plan.ppm as Time) as i64 - plan.ppm;
    let process = sim.add_process(Clock { base: sim.between(SEC, 1 << 50), ppm });
    let link = if stage.calm.get() { Link::default() } else { plan.link };
    sim.net.borrow_mut().links.push(vec![link; plan.nodes]);
    let users = stage.clone();
    let (sim, stage) = (sim.clone(), stage.clone());
    let main = sim.clone().start(process, move || {
        let ear = Arc::new(Ear::new(process, stage.plan.ttl));
        stage.ears.borrow_mut().push(ear.clone());
        let mgr = match begin(&stage, process, &ear) {
            Ok(mgr) => mgr,
            Err(error) => return sim.wrong(format!("no manager: {error}")),
        };
        for _ in 0..stage.plan.threads {
            let user = User { stage: stage.clone(), mgr: mgr.clone(), ear: ear.clone(), process };
            let users = sim.start(process, move || user.run());
            stage.users.borrow_mut().push((process, users));
        }
    });
    users.users.borrow_mut().push((process, main));
}

fn play(stage: &Rc<Stage>) {
    let (sim, plan) = (&stage.sim, &stage.plan);
    (0..plan.processes).for_each(|_| start_process(stage));
    enemy::begin(stage);
    let looking = || stage.look();
    let end = sim.now.get() + plan.length;
    sim.after(plan.length, |_| {});
    sim.run(|| {
        looking();
        sim.now.get() >= end
    });
    stage.calm.set(true);
    sim.stalls.set(Stalls::default());
    enemy::end(stage);
    sim.run(|| {
        looking();
        stage.is_deserted()
    });
    if sim.faults_found().is_empty() && !stage.is_deserted() {
        sim.wrong("somebody waits for something that does not come".into());
    }
    // Nothing outlives its lease: the last requests, late releases and claim windows included.
    let rest = sim.now.get() + 2 * plan.ttl + plan.claim_window + 2 * plan.operation_timeout + SEC;
    sim.after(rest - sim.now.get(), |_| {});
    sim.run(|| {
        looking();
        sim.now.get() >= rest
    });
    nothing_is_left(stage);
    sim.end();
}

fn nothing_is_left(stage: &Rc<Stage>) {
    let (sim, now) = (&stage.sim, stage.sim.now.get());
    let mut left = Vec::new();
    for (number, node) in sim.net.borrow().servers.iter().enumerate() {
        for (key, _, expires) in node.fake.keys.living(node.now_us(now)) {
            if key.starts_with(b"lock:") || expires.is_none() {
                left.push(format!("{} on node {number} (expires: {expires:?})", String::from_utf8_lossy(key)));
            }
        }
    }
    if !left.is_empty() && sim.faults_found().is_empty() {
        sim.wrong(format!("when all have gone, there is still {}", left.join(", ")));
    }
}

impl Stage {
    fn look(&self) {
        let (sim, plan) = (&self.sim, &self.plan);
        sim.watch();
        self.judge.look(sim);
        if sim.steps().is_multiple_of(16) {
            self.judge.look_at_all(sim);
        }
        let given = std::mem::take(&mut sim.net.borrow_mut().given);
        for (node, id) in given {
            let gave_up = self.ears.borrow().iter().find_map(|ear| ear.gave_up(&id));
            // What is asked for is void when its caller does not wait any more, as far as it knows the node's clock.
            let void = gave_up.map(|at| at + plan.operation_timeout + 200 * MS);
            if void.is_some_and(|void| sim.now.get() > void) {
                sim.wrong(format!("node {node} gives a lock to somebody who has given up long ago: {id}"));
            }
        }
    }

    /// All users of living processes have gone home.
    fn is_deserted(&self) -> bool {
        let users = self.users.borrow();
        let alive = |process: usize| self.sim.life(process) != Life::Dead;
        self.coming.get() == 0 && users.iter().all(|(process, user)| !alive(*process) || self.sim.is_done(*user))
    }
}
