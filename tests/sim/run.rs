//! One run: clients use locks while faults occur. Then all faults end, and every client must get
//! every lock.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
};

use super::{
    client::{Client, EventLog, new_manager},
    invariants::Invariants,
    nemesis,
    net::{Link, Server},
    node::FakeNode,
    scenario::Scenario,
    world::{Clock, MS, ProcessState, SEC, Sim, Stalls, Time, enter_sim},
};

/// The state that the clients, the nemesis and the checks of a run share.
pub(crate) struct Run {
    pub(crate) sim: Rc<Sim>,
    pub(crate) invariants: Invariants,
    pub(crate) scenario: Scenario,
    /// All faults have ended, and each client acquires each lock once more.
    pub(crate) fault_free: Cell<bool>,
    /// Process and thread of each client, and of the main thread of each process.
    pub(crate) clients: RefCell<Vec<(usize, usize)>>,
    /// Number of crashed processes that will start again.
    pub(crate) pending_restarts: Cell<u32>,
    pub(crate) event_logs: RefCell<Vec<Arc<EventLog>>>,
}

/// The result of a run.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) violations: Vec<String>,
    pub(crate) digest: u64,
    pub(crate) steps: u64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

/// Runs a seed; `adjust` may change the scenario that was chosen from the seed.
pub(crate) fn run_seed(seed: u64, verbose: bool, adjust: impl FnOnce(&mut Scenario)) -> Report {
    let sim = Sim::new(seed, verbose);
    let mut scenario = Scenario::new(&mut sim.rng.borrow_mut());
    adjust(&mut scenario);
    sim.log(|| format!("{scenario:#?}"));
    enter_sim(Some(sim.clone()));
    let invariants = Invariants::default();
    // With two nodes there is no quarantine, because they cannot do without one of them.
    invariants.data_loss_is_excused.set(scenario.nodes < 3);
    let run = Rc::new(Run {
        sim: sim.clone(),
        invariants,
        scenario,
        fault_free: Cell::new(false),
        clients: RefCell::default(),
        pending_restarts: Cell::new(0),
        event_logs: RefCell::default(),
    });
    set_up(&run);
    execute(&run);
    let report = Report {
        violations: sim.violations(),
        digest: sim.digest(),
        steps: sim.steps(),
        counts: run.invariants.counts.borrow().clone(),
    };
    // What is dropped here belongs to the simulator, so this thread must not have left it yet.
    run.invariants.records.borrow_mut().clear();
    drop(run);
    enter_sim(None);
    report
}

pub(crate) fn set_up(run: &Rc<Run>) {
    let (sim, scenario) = (&run.sim, &run.scenario);
    let drift = || sim.between(0, 2 * scenario.drift_ppm as Time) as i64 - scenario.drift_ppm;
    for _ in 0..scenario.nodes {
        // The clocks of the nodes agree, but not exactly.
        let base = 1_700_000_000 * SEC + sim.between(0, 50 * MS);
        let clock = Clock { base, drift_ppm: drift() };
        let mut fake = FakeNode::default();
        fake.flaw = scenario.flaw;
        // The server has already been up for 1,000 seconds.
        (fake.run_id, fake.up_since_us) =
            (sim.rng.borrow_mut().u64(..), clock.at(0) / 1_000 - 1_000_000_000);
        let server = Server {
            fake,
            clock,
            up: true,
            stopped: false,
            started_at: 0,
            forgot_at: Vec::new(),
            disk: Default::default(),
            requests_served: 0,
        };
        sim.net.borrow_mut().servers.push(server);
    }
    sim.net.borrow_mut().breaks_per_million = scenario.breaks_per_million;
    let mut fault_log = sim.fault_log.borrow_mut();
    fault_log.usual_delay = scenario.link.max_delay.max(Link::default().max_delay);
    fault_log.quarantine = if scenario.durable || scenario.nodes < 3 { 0 } else { scenario.ttl };
    sim.stalls.set(scenario.stalls);
}

/// Starts a process with a clock and clients of its own.
pub(crate) fn start_process(run: &Rc<Run>) {
    let (sim, scenario) = (&run.sim, &run.scenario);
    let drift_ppm = sim.between(0, 2 * scenario.drift_ppm as Time) as i64 - scenario.drift_ppm;
    let process = sim.add_process(Clock { base: sim.between(SEC, 1 << 50), drift_ppm });
    let link = if run.fault_free.get() { Link::default() } else { scenario.link };
    sim.net.borrow_mut().links.push(vec![link; scenario.nodes]);
    let outer = run.clone();
    let (sim, run) = (sim.clone(), run.clone());
    let main = sim.clone().start_thread(process, move || {
        let event_log = Arc::new(EventLog::new(process, run.scenario.ttl));
        run.event_logs.borrow_mut().push(event_log.clone());
        let mgr = match new_manager(&run, process, &event_log) {
            Ok(mgr) => mgr,
            Err(error) => return sim.violation(format!("could not create a manager: {error}")),
        };
        for _ in 0..run.scenario.threads {
            let client = Client {
                run: run.clone(),
                mgr: mgr.clone(),
                event_log: event_log.clone(),
                process,
            };
            let thread = sim.start_thread(process, move || client.work());
            run.clients.borrow_mut().push((process, thread));
        }
    });
    outer.clients.borrow_mut().push((process, main));
}

fn execute(run: &Rc<Run>) {
    let (sim, scenario) = (&run.sim, &run.scenario);
    (0..scenario.processes).for_each(|_| start_process(run));
    nemesis::start(run);
    let end = sim.now.get() + scenario.duration;
    sim.after(scenario.duration, |_| {});
    sim.run_until(|| {
        run.check_step();
        sim.now.get() >= end
    });
    run.fault_free.set(true);
    sim.stalls.set(Stalls::default());
    nemesis::end_all(run);
    sim.run_until(|| {
        run.check_step();
        run.have_all_clients_ended()
    });
    if sim.violations().is_empty() && !run.have_all_clients_ended() {
        sim.violation("a client waits for ever".into());
    }
    // Everything that can be left expires within this time: leases, late requests and claim
    // windows.
    let rest = 2 * scenario.ttl + scenario.claim_window + 2 * scenario.operation_timeout + SEC;
    let end = sim.now.get() + rest;
    sim.after(rest, |_| {});
    sim.run_until(|| {
        run.check_step();
        sim.now.get() >= end
    });
    check_leftovers(run);
    sim.shut_down();
}

fn check_leftovers(run: &Rc<Run>) {
    let (sim, now) = (&run.sim, run.sim.now.get());
    let mut left = Vec::new();
    for (number, node) in sim.net.borrow().servers.iter().enumerate() {
        for (key, _, expires) in node.fake.keys.live_entries(node.now_us(now)) {
            let is_fence = key == b"distlock:fence";
            if key.starts_with(b"lock:") || expires.is_none() && !is_fence {
                left.push(format!(
                    "{} on node {number} (expires: {expires:?})",
                    String::from_utf8_lossy(key)
                ));
            }
        }
    }
    if !left.is_empty() && sim.violations().is_empty() {
        sim.violation(format!(
            "after all clients have ended, these keys are left: {}",
            left.join(", ")
        ));
    }
}

impl Run {
    /// Checks the invariants after a step of the simulator.
    fn check_step(&self) {
        let (sim, scenario) = (&self.sim, &self.scenario);
        sim.log_faults();
        self.invariants.check_changed(sim);
        if sim.steps().is_multiple_of(16) {
            self.invariants.check_all(sim);
        }
        let granted = std::mem::take(&mut sim.net.borrow_mut().granted);
        for (node, id) in granted {
            let failed_at =
                self.event_logs.borrow().iter().find_map(|event_log| event_log.failed_at(&id));
            // The request expires when its caller stops waiting, as far as the caller knows the
            // node's clock.
            let expiry = failed_at.map(|at| at + scenario.operation_timeout + 200 * MS);
            if expiry.is_some_and(|expiry| sim.now.get() > expiry) {
                sim.violation(format!(
                    "node {node} granted a lock to a request that has failed long ago: {id}"
                ));
            }
        }
    }

    /// Whether all clients of live processes have ended.
    fn have_all_clients_ended(&self) -> bool {
        let clients = self.clients.borrow();
        let alive = |process: usize| self.sim.process_state(process) != ProcessState::Dead;
        self.pending_restarts.get() == 0
            && clients.iter().all(|(process, thread)| !alive(*process) || self.sim.is_done(*thread))
    }
}

/// Seeds that once violated an invariant, or seemed to.
///
/// Fault: N234
#[test]
fn seeds_that_found_a_fault_run_without_violations() {
    for (seed, fault) in [
        (838_042, "a mutex expired after its renewal, which the request for a reader followed"),
        (822_967, "a repair and then a probe, both of silent nodes, delayed renewals"),
        (828_501, "as the seed before, on other nodes"),
        (816_969, "a writer that expired before its downgrade was sent was reported as gone"),
        (898_337, "the checks did not excuse a loss of data before a hand-over within a process"),
        (833_311, "detaching waited first for late copies of a request, then for a renewal"),
    ] {
        let report = run_seed(seed, false, |_| {});
        assert!(report.violations.is_empty(), "{seed}: {fault}: {:#?}", report.violations);
    }
}
