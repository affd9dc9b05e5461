//! Watching over a command that runs: signals, its end, the loss of its lock, the time.

use std::time::Duration;

use crossbeam_channel::{Receiver, never, select};
use distlock::{LockError, LockGuard, LockLost};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_current_process_group, wait};
use signal_hook::consts::{SIGCHLD, SIGCONT};

use super::{
    course::Course,
    guardian::Guardian,
    keyed::Keyed,
    notice::Notice,
    number,
    process::Group,
    terminal::{Stopped, Terminal, wants_terminal},
    trouble::Trouble,
    vigil::{Vigil, next_word_after},
    word::Word,
};
use crate::{args::Run, clock, exit::Exit, job::somebody_could_wake_us, output, text};

/// Between two looks at what a command has left behind, of which not everything tells us when it ends.
const LOOK: Duration = Duration::from_millis(20);
/// Between two looks at whether a terminal has stopped a part of the command, of which nobody tells us.
const LOOK_AT_PARTS: Duration = Duration::from_secs(1);

/// Everything that has to do with a command that runs.
#[derive(Debug)]
pub(super) struct Supervisor<'a> {
    command: Pid,
    guard: &'a LockGuard,
    heard: &'a Receiver<i32>,
    guardian: &'a mut Guardian,
    /// What the guardian knows about us, while there is one.
    vigil: Option<Vigil>,
    terminal: Option<Terminal>,
    course: Course,
    ttl: Duration,
    notice: Notice,
    trouble: &'a Trouble,
    lost: Receiver<LockLost>,
    /// The command was stopped, and we with it.
    pausing: bool,
    next_word: Duration,
    next_look_at_parts: Duration,
    keyed: Keyed,
    /// What was passed on last, and who else has got it.
    passed_on: Option<(u8, Keyed)>,
}

/// How the command went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ending {
    pub(super) exit: Exit,
    /// If it was a signal.
    pub(super) keyed: Keyed,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(
        command: Pid,
        guard: &'a LockGuard,
        heard: &'a Receiver<i32>,
        guardian: &'a mut Guardian,
        terminal: Option<Terminal>,
        options: &Run,
        trouble: &'a Trouble,
    ) -> Supervisor<'a> {
        let now = clock::since_boot();
        let course = Course::new(options.grace, options.max_hold.map(|limit| now.saturating_add(limit)));
        let lost = guard.lost().clone();
        let notice = Notice { ttl: guard.remaining(), grace: options.grace };
        let mut vigil = Vigil::begin(options.ttl, options.grace, now);
        vigil.hear(&Word::Group(command.as_raw_nonzero().get(), now.saturating_add(guard.remaining())), now);
        Supervisor {
            command,
            guard,
            heard,
            guardian,
            vigil: Some(vigil),
            terminal,
            course,
            ttl: options.ttl,
            notice,
            trouble,
            lost,
            pausing: false,
            next_word: now,
            next_look_at_parts: now,
            keyed: Keyed::Nobody,
            passed_on: None,
        }
    }

    /// Returns when nothing of the command's process group is left.
    pub(super) fn run(mut self) -> Ending {
        // What happened to the command before it could begin.
        self.reap();
        loop {
            let now = clock::since_boot();
            self.admit_silence(now);
            self.reassure(now);
            self.wake_parts(now);
            if self.course.has_ended() {
                // First of all: to a group that is gone, nothing must be sent. Its number may be somebody else's.
                if !self.group().is_alive() {
                    break;
                }
                self.group().send(self.course.leftovers(now));
            }
            self.run_out(now);
            self.miss_lock();
            let too_long = self.course.is_too_long();
            self.group().send(self.course.tick(now));
            if self.course.is_too_long() && !too_long {
                let name = self.guard.name().escape_debug();
                say_it_ends(&format!("the command under lock \"{name}\" has run for longer than --max-hold"));
            }
            let pause = clock::timer(self.next(), now);
            select! {
                recv(self.heard) -> signal => signal.into_iter().for_each(|signal| self.hear(signal)),
                recv(self.lost) -> why => self.lose(why.ok()),
                default(pause) => {}
            }
        }
        self.tell(&Word::Over);
        Ending { exit: self.course.exit(), keyed: self.keyed }
    }

    fn group(&self) -> Group {
        Group(self.command)
    }

    fn next(&self) -> Duration {
        let parts = self.terminal.is_some().then_some(self.next_look_at_parts);
        let look = self.course.has_ended().then(|| clock::since_boot().saturating_add(LOOK));
        let word = (!self.pausing).then_some(self.next_word);
        let chance = self.last_chance();
        self.course.next().into_iter().chain(look).chain(word).chain(parts).chain(chance).min().unwrap_or(Duration::MAX)
    }

    /// Tells the guardian that all is well.
    fn reassure(&mut self, now: Duration) {
        if self.pausing || now < self.next_word {
            return;
        }
        self.next_word = now.saturating_add(next_word_after(self.guard.remaining(), self.ttl));
        if self.guard.is_held() {
            self.tell(&Word::HeldUntil(now.saturating_add(self.guard.remaining())));
        }
    }

    fn tell(&mut self, word: &Word) {
        if let Some(vigil) = &mut self.vigil {
            vigil.hear(word, clock::since_boot());
        }
        self.guardian.tell(word);
    }

    /// We were kept from running for so long that the guardian has ended the command. It might look as if anybody had.
    fn admit_silence(&mut self, now: Duration) {
        let alarm = self.vigil.as_ref().and_then(Vigil::alarm);
        // Of a lock that is lost it will be told in other words, and of one that runs out it has been.
        if alarm.is_none_or(|at| now < at) || !self.guard.is_held() || self.course.is_doomed() {
            return;
        }
        let kill_at = self.notice.kill_at(now, self.held_until());
        self.tell(&Word::Ending(kill_at));
        let signals = self.course.lost(kill_at);
        if !self.course.has_ended() {
            self.group().send(signals);
        }
        let name = self.guard.name().escape_debug();
        say_it_ends(&format!("distlock was kept from running until lock \"{name}\" was almost over"));
    }

    /// The lock has not been renewed, and there is just the time left to end the command before others can have it.
    fn run_out(&mut self, now: Duration) {
        self.notice.see(self.guard.remaining());
        if self.last_chance().is_none_or(|at| now < at) {
            return;
        }
        let kill_at = self.notice.kill_at(now, self.held_until());
        let signals = self.course.runs_out(kill_at);
        self.tell(&Word::Ending(kill_at));
        self.group().send(signals);
        if self.course.is_lost() {
            let name = self.guard.name().escape_debug();
            let why = self.trouble.why().map(|why| format!(": {}", text::clean(&why))).unwrap_or_default();
            say_it_ends(&format!("lock \"{name}\" could not be renewed in time{why}"));
        }
    }

    /// Who is to tell of a loss may not have woken up yet when the machine has.
    fn miss_lock(&mut self) {
        if self.course.is_doomed() {
            return;
        }
        if let Err(error) = self.guard.ensure_held() {
            let why = if let LockError::Lost { why, .. } = error { Some(why) } else { None };
            self.lose(why);
        }
    }

    /// When the command has to be asked to end if nothing is heard of a renewal until then.
    fn last_chance(&self) -> Option<Duration> {
        // Of a lock that is lost the reason will be told in a moment.
        (self.guard.is_held() && !self.course.is_doomed()).then(|| self.notice.ask_at(self.held_until()))
    }

    fn held_until(&self) -> Duration {
        clock::since_boot().saturating_add(self.guard.remaining())
    }

    fn hear(&mut self, signal: i32) {
        match signal {
            SIGCHLD => self.reap(),
            SIGCONT => self.go_on(),
            signal => {
                self.passed_on = Some((number(signal), Keyed::heard_at(self.terminal.as_ref())));
                let signal = Signal::from_named_raw(signal);
                self.group().send(signal.as_slice());
                // One that is stopped could not hear it.
                if [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM].map(Some).contains(&signal) {
                    self.group().send(&[Signal::CONT]);
                }
            }
        }
    }

    /// Looks at all that has happened to the command, and to what it left to us.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if pid != self.command {
                // One that is stopped is told of too.
                if ended(status).is_some() && self.guardian.has_ended(pid) {
                    self.vigil = None;
                }
            } else if let Some(exit) = ended(status) {
                let had_terminal = self.terminal.as_mut().is_some_and(Terminal::take_back);
                self.keyed = match self.passed_on {
                    // What the terminal sends to a command that has the foreground we never hear.
                    Some((signal, keyed)) if exit == Exit::Signal(signal) => keyed,
                    _ if had_terminal => Keyed::Command,
                    _ => Keyed::Nobody,
                };
                self.course.ended(exit);
            } else if let Some(signal) = status.stopping_signal() {
                self.stopped(signal);
            }
        }
    }

    fn stopped(&mut self, signal: i32) {
        let group = self.group();
        let Some(terminal) = &mut self.terminal else { return };
        match terminal.stopped_by(signal) {
            Stopped::GiveTerminal => {
                terminal.give_to(group);
                group.send(&[Signal::CONT]);
            }
            Stopped::StopToo => {
                self.pausing = true;
                self.tell(&Word::Pausing);
                // Not all of it need have stopped, and nobody renews any more.
                group.send(&[Signal::STOP]);
                // The whole job stops, ourselves included. We hear of it when it goes on.
                if kill_current_process_group(Signal::STOP).is_err() {
                    self.go_on();
                }
            }
            Stopped::GoOn => group.send(&[Signal::CONT]),
            Stopped::LeaveIt if wants_terminal(signal) => output::say(
                "the command has stopped, for it wants the terminal, and distlock is not in its foreground; \
                 end it, and start it in the foreground or with another input",
            ),
            Stopped::LeaveIt => {}
        }
    }

    /// A terminal stops one process of the group after the other, some after the first was let go on. A shell that has just
    /// split off a command is not stopped before that has begun; and it does not begin if it was stopped itself.
    fn wake_parts(&mut self, now: Duration) {
        if self.terminal.is_none() || now < self.next_look_at_parts {
            return;
        }
        self.next_look_at_parts = now.saturating_add(LOOK_AT_PARTS);
        if !somebody_could_wake_us() && self.group().is_half_stopped() {
            self.group().send(&[Signal::CONT]);
        }
    }

    /// Somebody lets us go on, and so the command. The lock may have been lost meanwhile, and then it must not.
    fn go_on(&mut self) {
        self.pausing = false;
        self.next_word = clock::since_boot();
        let group = self.group();
        if let Some(terminal) = &mut self.terminal {
            terminal.give_if_wanted(group);
        }
        if self.guard.is_held() {
            group.send(&[Signal::CONT]);
        }
    }

    fn lose(&mut self, why: Option<LockLost>) {
        // It is told once.
        self.lost = never();
        let (why, now) = (why.unwrap_or(LockLost::Expired), clock::since_boot());
        let kill_at = match why {
            // It may be somebody else's already, whatever we do, and the command may have much to put in order.
            LockLost::Gone | LockLost::Taken { .. } => now.saturating_add(self.notice.grace),
            _ => now,
        };
        let told = self.course.is_lost();
        let signals = self.course.lost(kill_at);
        self.tell(&Word::Ending(kill_at));
        self.group().send(signals);
        if told {
            return;
        }
        let name = self.guard.name().escape_debug();
        say_it_ends(&format!("lock \"{name}\" is lost: {}", text::clean(&why.to_string())));
    }
}

fn say_it_ends(why: &str) {
    output::say(&format!("{why}; the command is ended"));
}

fn ended(status: WaitStatus) -> Option<Exit> {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(Exit::Code(number(code))),
        (None, Some(signal)) => Some(Exit::Signal(number(signal))),
        (None, None) => None,
    }
}
