//! The enemy: chooses by a seed what goes wrong next, does it, writes it down before and after, and undoes it in time.

use std::{sync::Arc, time::Duration};

use fastrand::Rng;

use crate::{
    Outcome,
    crew::Crew,
    history::{Event, Fault, Journal, Kind, Record, now},
    nanos,
    network::{MODES, SHOTS, shoot, suffer},
    stage::{SIDES, Stage, fence_of, key_of, line_of, pid_of},
    support::Armed,
};

pub(crate) struct Enemy<'a> {
    stage: &'a Stage,
    journal: Arc<Journal>,
    dice: Rng,
    ttl: Duration,
    locks: u32,
    number: u32,
    ongoing: Vec<Ongoing>,
    /// When each node was last in trouble that others may have to make up for.
    troubled: Vec<u64>,
}

struct Ongoing {
    number: u32,
    /// None for all.
    node: Option<usize>,
    /// Of the ways to it, where only that is in trouble.
    side: Option<usize>,
    until: u64,
    end: End,
}

enum End {
    Cont(usize),
    Start { node: usize, with_data: bool },
    Room(usize),
    Heal(Vec<(usize, usize)>),
    Disarm(Armed),
}

impl<'a> Enemy<'a> {
    pub(crate) fn new(stage: &'a Stage, journal: Arc<Journal>, dice: Rng, ttl: Duration, locks: u32) -> Enemy<'a> {
        let troubled = vec![0; stage.len()];
        Enemy { stage, journal, dice, ttl, locks, number: 0, ongoing: Vec::new(), troubled }
    }

    /// Does one thing to somebody.
    pub(crate) fn strike(&mut self, crew: &mut Crew) -> Outcome {
        let victim = self.dice.usize(..crew.len());
        match self.dice.u32(..100) {
            0..12 => crew.kill(victim),
            12..22 => {
                let span = self.span(10, self.ttl.as_millis() as u64 / 2);
                crew.stop(victim, span).map(drop)
            }
            22..34 => {
                let span = self.ttl + self.span(50, 2500);
                crew.stop(victim, span).map(drop)
            }
            34..54 => self.shot(),
            54..68 => self.mode(),
            68..71 => self.blackout(),
            71..74 => self.instant(Kind::Reset),
            74..77 => self.instant(Kind::CutClients),
            77..80 => self.instant(Kind::FlushScripts),
            80..84 if self.several() => self.roll(crew),
            _ => self.ill_treat_a_server(),
        }
    }

    /// Takes the key from somebody who has had it for long and has just renewed it; false if there is nobody.
    pub(crate) fn surprise(&mut self) -> Outcome<bool> {
        let node = self.dice.usize(..self.stage.len());
        for lock in 1..=self.locks {
            let keys = [key_of(lock), fence_of(lock)];
            let server = self.stage.nodes.server(node);
            let (left, held_us): (i64, i64) = server.query(&["EVAL", AGE, "2", &keys[0], &keys[1]]);
            let ttl = self.ttl.as_millis() as i64;
            if left > ttl * 9 / 10 && held_us > ttl * 400 {
                self.take_away(node, lock, None)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Which worker holds some lock, as the first node has it.
    pub(crate) fn some_holder(&mut self, crew: &Crew) -> Option<usize> {
        let lock = self.dice.u32(1..=self.locks);
        let id: Option<String> = self.stage.nodes.server(0).query(&["GET", &key_of(lock)]);
        crew.index_of(pid_of(&id?)?)
    }

    fn span(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.dice.u64(least..most.max(least + 1)))
    }

    fn several(&self) -> bool {
        self.stage.len() > 1
    }

    /// Whether a node may get into trouble now: nothing else is wrong with it, and no more than a minority will be in
    /// trouble at once. One alone may always.
    fn may_trouble(&self, node: usize) -> bool {
        let in_trouble = |node: &usize| self.ongoing.iter().any(|ongoing| ongoing.node == Some(*node));
        if !self.several() {
            return !self.ongoing.iter().any(|ongoing| ongoing.node == Some(node) && ongoing.side.is_none());
        }
        let others = (0..self.stage.len()).filter(|other| *other != node).filter(in_trouble).count();
        others < (self.stage.len() - 1) / 2 && !in_trouble(&node) && !self.ongoing.iter().any(|on| on.node.is_none())
    }

    fn ill_treat_a_server(&mut self) -> Outcome {
        let node = self.dice.usize(..self.stage.len());
        let kinds: &[Kind] = &[
            Kind::Freeze,
            Kind::Restart,
            Kind::Forget,
            Kind::Full,
            Kind::Evict,
            Kind::Delete,
            Kind::Delete,
            Kind::DeleteLine,
            Kind::DeleteFence,
            Kind::Step,
            Kind::Step,
        ];
        let kind = kinds[self.dice.usize(..kinds.len())];
        if !self.may_trouble(node) {
            return Ok(());
        }
        match kind {
            Kind::Freeze => {
                let until = self.span(20, 2500);
                let number = self.begin(node, 0, kind, until.as_millis() as u64)?;
                self.stage.stop(node);
                self.go_on(number, Some(node), None, until, End::Cont(node));
            }
            Kind::Restart | Kind::Forget => {
                // Of several, what keeps nothing on disk forgets. What writes everything down may lose its disk.
                let forgets = self.several() && !self.stage.is_durable(node);
                let kind = if forgets { Kind::Forget } else { kind };
                let until = self.span(0, 1500);
                let number = self.begin(node, 0, kind, until.as_millis() as u64)?;
                self.stage.kill(node);
                let with_data = kind == Kind::Restart;
                self.go_on(number, Some(node), None, until, End::Start { node, with_data });
            }
            Kind::Full => {
                let until = self.span(100, 2000);
                let number = self.begin(node, 0, kind, 0)?;
                self.stage.nodes.config_set(node, "maxmemory", "1");
                self.go_on(number, Some(node), None, until, End::Room(node));
            }
            // Several nodes do not promise anything when one of them throws keys away.
            Kind::Evict if !self.several() => {
                let policies = ["allkeys-random", "volatile-ttl", "allkeys-lru"];
                let policy = policies[self.dice.usize(..policies.len())];
                let until = self.span(5, 100);
                let number = self.begin(node, 0, kind, 0)?;
                self.stage.nodes.config_set(node, "maxmemory-policy", policy);
                self.stage.nodes.config_set(node, "maxmemory", "1");
                self.go_on(number, Some(node), None, until, End::Room(node));
            }
            Kind::Delete => {
                let lock = self.dice.u32(1..=self.locks);
                self.take_away(node, lock, None)?;
            }
            Kind::Step => {
                let (lock, by) = (self.dice.u32(1..=self.locks), self.dice.u64(50..3000));
                self.take_away(node, lock, Some(by))?;
            }
            Kind::DeleteLine | Kind::DeleteFence => {
                let lock = self.dice.u32(1..=self.locks);
                let key = if kind == Kind::DeleteLine { line_of(lock) } else { fence_of(lock) };
                let number = self.begin(node, lock, kind, 0)?;
                self.stage.nodes.server(node).cli(&["DEL", &key]);
                self.over(number)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// All nodes forget, those that write everything down too, one soon after the other and no more than a minority at a
    /// time. A holder that is stopped can do nothing about it, and believes: only their quarantine keeps the lock for it.
    pub(crate) fn roll(&mut self, crew: &mut Crew) -> Outcome {
        if !self.several() || !self.ongoing.is_empty() {
            return Ok(());
        }
        if let Some(holder) = self.some_holder(crew) {
            crew.stop(holder, self.ttl)?;
        }
        let mut nodes: Vec<usize> = (0..self.stage.len()).collect();
        self.dice.shuffle(&mut nodes);
        for some in nodes.chunks((self.stage.len() - 1) / 2) {
            let mut numbers = Vec::new();
            for node in some {
                numbers.push(self.begin(*node, 0, Kind::Forget, 0)?);
                self.stage.kill(*node);
            }
            for (node, number) in some.iter().zip(numbers) {
                self.stage.start(*node, false);
                self.troubled[*node] = now();
                self.over(number)?;
            }
        }
        Ok(())
    }

    /// Deletes the key of a lock, or makes it look older. Of several nodes, only where enough others keep the lock for the
    /// same holder and for no shorter time; and nothing is wrong elsewhere, so that a renewal reaches them all.
    fn take_away(&mut self, node: usize, lock: u32, step: Option<u64>) -> Outcome {
        let key = key_of(lock);
        let kind = if step.is_some() { Kind::Step } else { Kind::Delete };
        let server = self.stage.nodes.server(node);
        if !self.several() {
            // A clock steps for all keys.
            let (lock, amount) = (if step.is_some() { 0 } else { lock }, step.unwrap_or(0));
            let number = self.begin(node, lock, kind, amount)?;
            match step {
                Some(by) => drop(server.cli(&["EVAL", STEP_ALL, "0", &by.to_string()])),
                None => drop(server.cli(&["DEL", &key])),
            }
            return self.over(number);
        }
        let since = now().saturating_sub(nanos(self.ttl) + 1_500_000_000);
        if !self.ongoing.is_empty() || self.troubled.iter().any(|at| *at > since) {
            return Ok(());
        }
        let mut kept = Vec::new();
        for node in 0..self.stage.len() {
            let server = self.stage.nodes.server(node);
            let (id, left): (Option<String>, i64) = server.query(&["EVAL", LOOK, "1", &key]);
            kept.push((id, now() + u64::try_from(left).unwrap_or(0) * 1_000_000));
        }
        let Some(id) = kept[node].0.clone() else { return Ok(()) };
        let quorum = self.stage.len() / 2 + 1;
        let expiries = |without: Option<usize>| {
            let keep = kept
                .iter()
                .enumerate()
                .filter(|(at, (holder, _))| holder.as_ref() == Some(&id) && Some(*at) != without);
            let mut expiries: Vec<u64> = keep.map(|(_, (_, expiry))| *expiry).collect();
            expiries.sort_unstable_by(|one, other| other.cmp(one));
            expiries.get(quorum - 1).copied()
        };
        let (Some(before), Some(after)) = (expiries(None), expiries(Some(node))) else { return Ok(()) };
        if before > after + 5_000_000 {
            return Ok(());
        }
        let amount = step.unwrap_or(0);
        let number = self.begin(node, lock, kind, amount)?;
        server.cli(&["EVAL", STEP_ONE, "1", &key, &id, &step.map_or_else(|| "all".into(), |by| by.to_string())]);
        self.troubled[node] = now();
        self.over(number)
    }

    /// Something happens to one exchange, or a few.
    fn shot(&mut self) -> Outcome {
        let (node, side) = (self.dice.usize(..self.stage.len()), self.dice.usize(..SIDES));
        let kind = SHOTS[self.dice.usize(..SHOTS.len())];
        let until = self.span(50, 900);
        if !self.way_is_free(node, side) || (self.several() && !self.may_trouble(node)) {
            return Ok(());
        }
        let number = self.begin(node, 0, kind, 0)?;
        let armed = shoot(self.stage.proxy(node, side), kind, &mut self.dice);
        self.go_on(number, Some(node), Some(side), until, End::Disarm(armed));
        Ok(())
    }

    /// Something is wrong with a way for a while.
    fn mode(&mut self) -> Outcome {
        let (node, side) = (self.dice.usize(..self.stage.len()), self.dice.usize(..SIDES));
        let kind = MODES[self.dice.usize(..MODES.len())];
        let until = self.span(50, 2500);
        if !self.way_is_free(node, side) || (self.several() && !self.may_trouble(node)) {
            return Ok(());
        }
        let number = self.begin(node, 0, kind, until.as_millis() as u64)?;
        suffer(self.stage.proxy(node, side), kind, &mut self.dice);
        self.go_on(number, Some(node), Some(side), until, End::Heal(vec![(node, side)]));
        Ok(())
    }

    fn way_is_free(&self, node: usize, side: usize) -> bool {
        !self.ongoing.iter().any(|on| on.node.is_none() || (on.node == Some(node) && on.side == Some(side)))
    }

    /// Half of the workers are cut off from all nodes. Nobody can believe in more for it, so it need be no minority.
    fn blackout(&mut self) -> Outcome {
        if self.ongoing.iter().any(|on| on.node.is_none() || on.side.is_some()) {
            return Ok(());
        }
        let (side, kind) = (self.dice.usize(..SIDES), MODES[self.dice.usize(..MODES.len())]);
        let until = self.span(50, 3000);
        let number = self.tell_of(0, 0, kind, until.as_millis() as u64)?;
        let ways: Vec<_> = (0..self.stage.len()).map(|node| (node, side)).collect();
        for (node, side) in &ways {
            suffer(self.stage.proxy(*node, *side), kind, &mut self.dice);
        }
        self.go_on(number, None, Some(side), until, End::Heal(ways));
        Ok(())
    }

    /// What is over as soon as it is done, and harms nobody for longer.
    fn instant(&mut self, kind: Kind) -> Outcome {
        let node = self.dice.usize(..self.stage.len());
        if self.stage.is_away(node) {
            return Ok(());
        }
        let number = self.begin(node, 0, kind, 0)?;
        let server = self.stage.nodes.server(node);
        match kind {
            Kind::CutClients => {
                let types: [&[&str]; 3] = [&["TYPE", "normal"], &["TYPE", "pubsub"], &[]];
                let which = types[self.dice.usize(..types.len())];
                // All of them, where none is named: the filter must not be empty.
                let which = if which.is_empty() { &["LADDR", &server.addr().to_string()] } else { which };
                server.kill_clients(which);
            }
            Kind::FlushScripts => drop(server.cli(&["SCRIPT", "FLUSH"])),
            _ => self.stage.proxy(node, self.dice.usize(..SIDES)).reset_all(),
        }
        self.over(number)
    }

    /// Ends what has lasted long enough, or everything.
    pub(crate) fn relent(&mut self, all: bool) -> Outcome {
        let mut index = 0;
        while index < self.ongoing.len() {
            let ongoing = &self.ongoing[index];
            if !all && ongoing.until > now() {
                index += 1;
                continue;
            }
            let ongoing = self.ongoing.swap_remove(index);
            match ongoing.end {
                End::Cont(node) => self.stage.cont(node),
                End::Start { node, with_data } => self.stage.start(node, with_data),
                End::Room(node) => {
                    self.stage.nodes.config_set(node, "maxmemory", "0");
                    self.stage.nodes.config_set(node, "maxmemory-policy", "noeviction");
                }
                End::Heal(ways) => ways.iter().for_each(|(node, side)| self.stage.proxy(*node, *side).heal()),
                End::Disarm(armed) => {
                    armed.disarm();
                    armed.let_go();
                }
            }
            match ongoing.node {
                Some(node) => self.troubled[node] = now(),
                None => self.troubled.fill(now()),
            }
            self.over(ongoing.number)?;
        }
        Ok(())
    }

    /// Writes down what is about to be done to a node.
    fn begin(&mut self, node: usize, lock: u32, kind: Kind, amount: u64) -> Outcome<u32> {
        self.tell_of(node + 1, lock, kind, amount)
    }

    fn tell_of(&mut self, node: usize, lock: u32, kind: Kind, amount: u64) -> Outcome<u32> {
        self.number += 1;
        let fault = Fault { number: self.number, node, kind, amount };
        self.tell(lock, Event::Fault(fault))?;
        Ok(self.number)
    }

    fn go_on(&mut self, number: u32, node: Option<usize>, side: Option<usize>, span: Duration, end: End) {
        self.ongoing.push(Ongoing { number, node, side, until: now() + nanos(span), end });
    }

    fn over(&self, number: u32) -> Outcome {
        self.tell(0, Event::Over { number })
    }

    fn tell(&self, lock: u32, event: Event) -> Outcome {
        Ok(self.journal.write(&Record { at: now(), seat: 0, lock, pid: std::process::id(), event })?)
    }
}

/// Who holds the lock, and for how long.
const LOOK: &str = "return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}";

/// For how many milliseconds the lock is kept, and how many microseconds ago it was given: its token is that moment.
const AGE: &str = "
local now = redis.call('TIME')
local token = tonumber(redis.call('GET', KEYS[2]) or 0)
return {redis.call('PTTL', KEYS[1]), now[1] * 1000000 + now[2] - token}";

/// A step of the clock is, to keys, an earlier expiry.
const STEP_ALL: &str = "
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  if left > 0 then redis.call('PEXPIRE', key, left - ARGV[1]) end
end";

/// The same for one lock while it has this holder; a step over everything is its end.
const STEP_ONE: &str = "
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return end
if ARGV[2] == 'all' then return redis.call('DEL', KEYS[1]) end
redis.call('PEXPIRE', KEYS[1], redis.call('PTTL', KEYS[1]) - ARGV[2])";
