//! Supervises the running command: its signals, its end, its time limit, and the loss of its lock.

use std::{collections::BTreeSet, time::Duration};

use crossbeam_channel::{Receiver, never, select};
use distlock::LockLost;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_current_process_group, wait};
use signal_hook::consts::{SIGCHLD, SIGCONT};

use super::{
    grace_period::GracePeriod,
    guardian_handle::GuardianHandle,
    held::Held,
    kill::{ProcessGroup, Termination},
    message::GuardianMessage,
    renewals::RenewalChange,
    terminal::{StopReaction, Terminal, wants_terminal},
    to_u8,
    tty_signal::SignalOrigin,
    watchdog::{Watchdog, next_heartbeat_after},
};
use crate::{clock, exit::Exit, format, job_control::has_job_control_parent, output};

/// Time between two checks of the processes that the command has left behind. They are polled,
/// because the wrapper is notified only of the end of its own children.
const STRAGGLER_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time that processes have to end after the command, if a signal reached all of them, before they
/// are reported as left behind.
const STRAGGLER_REPORT_DELAY: Duration = Duration::from_secs(1);
/// Time between two checks whether a terminal has stopped only a part of the command. This is
/// polled, because no signal reports it.
const STOP_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The state of the wrapper while the command runs.
#[derive(Debug)]
pub(super) struct Supervisor<'a> {
    command: Pid,
    held: &'a Held,
    signals: &'a Receiver<i32>,
    guardian: &'a mut GuardianHandle,
    /// Copy of what the guardian knows about this process. None once the guardian has ended.
    watchdog: Option<Watchdog>,
    terminal: Option<Terminal>,
    termination: Termination,
    ttl: Duration,
    grace_period: GracePeriod,
    renewals: &'a Receiver<RenewalChange>,
    /// Names of the locks whose last renewal failed or is overdue.
    unrenewed: BTreeSet<String>,
    /// Why the last renewal failed; `None` if it succeeded.
    renewal_error: Option<String>,
    /// A message has said that some lock cannot be renewed.
    has_reported_outage: bool,
    lost: Receiver<LockLost>,
    /// The command was stopped, and this process stopped itself too.
    paused: bool,
    /// No SIGTERM because of a missing renewal before this time: this process was stopped, and
    /// could not renew.
    renewable_until: Duration,
    next_heartbeat: Duration,
    next_stop_check: Duration,
    signal_origin: SignalOrigin,
    /// The last signal that was forwarded, and where it came from.
    last_forwarded: Option<(u8, SignalOrigin)>,
    quiet: bool,
    stragglers: StragglerReport,
    reach: ReachReport,
}

/// Whether the processes that the command has left behind have been reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StragglerReport {
    NotNeeded,
    /// Due if some of them still run at this time.
    DueAt(Duration),
    Done,
}

/// Whether it has been reported that the system permits no signal to the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReachReport {
    NotNeeded,
    /// A signal that should end the command has been sent.
    Due,
    Done,
}

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommandResult {
    pub(super) exit: Exit,
    /// Where the signal came from, if one ended the command.
    pub(super) signal_origin: SignalOrigin,
}

/// How long the command may run, and how long its end may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct SupervisorOptions {
    pub(super) ttl: Duration,
    pub(super) grace: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) quiet: bool,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(
        command: Pid,
        held: &'a Held,
        signals: &'a Receiver<i32>,
        guardian: &'a mut GuardianHandle,
        terminal: Option<Terminal>,
        options: SupervisorOptions,
        renewals: &'a Receiver<RenewalChange>,
    ) -> Supervisor<'a> {
        let now = clock::since_boot();
        let termination = Termination::new(
            options.grace,
            options.max_hold.map(|limit| now.saturating_add(limit)),
        );
        let lost = held.lost().clone();
        let mut grace_period = GracePeriod::new(options.ttl, options.grace);
        grace_period.start(held.remaining());
        let mut watchdog = Watchdog::new(options.ttl, options.grace, now);
        watchdog.on_message(
            &GuardianMessage::Started(
                command.as_raw_nonzero().get(),
                now.saturating_add(held.remaining()),
            ),
            now,
        );
        Supervisor {
            command,
            held,
            signals,
            guardian,
            watchdog: Some(watchdog),
            terminal,
            termination,
            ttl: options.ttl,
            grace_period,
            renewals,
            unrenewed: BTreeSet::new(),
            renewal_error: None,
            has_reported_outage: false,
            lost,
            paused: false,
            renewable_until: Duration::ZERO,
            next_heartbeat: now,
            next_stop_check: now,
            signal_origin: SignalOrigin::NotTty,
            last_forwarded: None,
            quiet: options.quiet,
            stragglers: StragglerReport::NotNeeded,
            reach: ReachReport::NotNeeded,
        }
    }

    /// Supervises the command until nothing is left of its process group.
    pub(super) fn run(mut self) -> CommandResult {
        // The command may have ended or stopped before this loop.
        self.reap();
        loop {
            let now = clock::since_boot();
            self.handle_late_wakeup(now);
            self.send_heartbeat(now);
            self.resume_stopped_members(now);
            if self.termination.has_exited() {
                // Check before sending anything, because once the group is gone, its number may
                // belong to another group.
                if !self.group().is_alive() {
                    break;
                }
                self.terminate_stragglers(now);
            }
            self.terminate_before_expiry(now);
            self.check_held();
            let was_over_max_hold = self.termination.is_over_max_hold();
            let signals = self.termination.on_tick(now);
            self.signal_command(signals);
            if self.termination.is_over_max_hold() && !was_over_max_hold {
                let locks = self.held.all();
                report_termination(&format!(
                    "the command under {locks} has run for longer than --max-hold"
                ));
            }
            self.report_out_of_reach();
            let pause = clock::time_to_next_check(self.next_wakeup(), now);
            select! {
                recv(self.signals) -> signal => {
                    signal.into_iter().for_each(|signal| self.on_signal(signal));
                }
                recv(self.lost) -> _ => self.on_lost(),
                recv(self.renewals) -> change => {
                    change.into_iter().for_each(|change| self.on_renewal_change(change));
                }
                default(pause) => {}
            }
        }
        self.send(&GuardianMessage::Done);
        CommandResult { exit: self.termination.exit(), signal_origin: self.signal_origin }
    }

    fn group(&self) -> ProcessGroup {
        ProcessGroup(self.command)
    }

    fn signal_command(&mut self, signals: &[Signal]) {
        self.group().send(signals);
        let must_end = signals.iter().any(|signal| ends(*signal) || *signal == Signal::KILL);
        if self.reach == ReachReport::NotNeeded && must_end {
            self.reach = ReachReport::Due;
        }
    }

    /// Reports once that the command goes on because its processes are those of another user.
    fn report_out_of_reach(&mut self) {
        if self.reach == ReachReport::Due && self.group().is_out_of_reach() {
            self.reach = ReachReport::Done;
            output::print_message(OUT_OF_REACH);
        }
    }

    fn next_wakeup(&self) -> Duration {
        let stop_check = self.terminal.is_some().then_some(self.next_stop_check);
        let straggler_poll = self
            .termination
            .has_exited()
            .then(|| clock::since_boot().saturating_add(STRAGGLER_POLL_INTERVAL));
        let heartbeat = (!self.paused).then_some(self.next_heartbeat);
        self.termination
            .next_deadline()
            .into_iter()
            .chain(straggler_poll)
            .chain(heartbeat)
            .chain(stop_check)
            .chain(self.term_deadline())
            .min()
            .unwrap_or(Duration::MAX)
    }

    /// Reports to the guardian that this process runs, and until when the lock is held.
    fn send_heartbeat(&mut self, now: Duration) {
        if self.paused || now < self.next_heartbeat {
            return;
        }
        self.next_heartbeat =
            now.saturating_add(next_heartbeat_after(self.held.remaining(), self.ttl));
        if self.held.is_held() {
            self.send(&GuardianMessage::HeldUntil(now.saturating_add(self.held.remaining())));
        }
    }

    fn send(&mut self, message: &GuardianMessage) {
        if let Some(watchdog) = &mut self.watchdog {
            watchdog.on_message(message, clock::since_boot());
        }
        self.guardian.send(message);
    }

    /// If this process did not run for a while, the guardian has ended the command. Reports that,
    /// because otherwise the command would seem to end for no reason.
    fn handle_late_wakeup(&mut self, now: Duration) {
        let deadline = self.watchdog.as_ref().and_then(Watchdog::deadline);
        // `check_held` reports a lost lock, and an expiring one has been reported already.
        if deadline.is_none_or(|at| now < at)
            || !self.held.is_held()
            || self.termination.is_lock_ending()
        {
            return;
        }
        let kill_at = self.grace_period.kill_at(now, self.held_until());
        self.send(&GuardianMessage::Terminating(kill_at));
        let signals = self.termination.on_lost(kill_at);
        if !self.termination.has_exited() {
            self.signal_command(signals);
        }
        let lock = self.held.any();
        report_termination(&format!("distlock got no CPU time until {lock} had almost expired"));
    }

    /// Ends the processes that the command has left behind, and reports them, because otherwise a
    /// background process would seem to end for no reason.
    fn terminate_stragglers(&mut self, now: Duration) {
        let signals = self.termination.terminate_stragglers(now);
        // After an earlier SIGTERM, the end of the whole group has a reason that is known.
        if !signals.is_empty() && !self.quiet {
            // After a signal to all of them, some may just end a little later than the command.
            let delay =
                if self.ended_by_signal_to_all() { STRAGGLER_REPORT_DELAY } else { Duration::ZERO };
            self.stragglers = StragglerReport::DueAt(now.saturating_add(delay));
        }
        if let StragglerReport::DueAt(at) = self.stragglers
            && now >= at
        {
            let pids = self.group().live_members();
            // They may have just ended, or be hidden. Hidden ones still run at the next look.
            let is_first_look = !signals.is_empty();
            if !pids.is_empty() || !is_first_look {
                self.stragglers = StragglerReport::Done;
                output::print_message(&describe_stragglers(&pids));
            }
        }
        self.signal_command(signals);
    }

    /// Whether a signal that ends processes was sent to the whole group, by this process or by the
    /// terminal.
    fn ended_by_signal_to_all(&self) -> bool {
        let ends = |signal: u8| Signal::from_named_raw(i32::from(signal)).is_some_and(ends);
        self.last_forwarded.is_some_and(|(signal, _)| ends(signal))
            || self.signal_origin != SignalOrigin::NotTty
                && matches!(self.termination.exit(), Exit::Signal(signal) if ends(signal))
    }

    /// Terminates the command if the lock was not renewed, and only just enough time is left for
    /// the command to end before the lock expires.
    fn terminate_before_expiry(&mut self, now: Duration) {
        self.grace_period.extend(self.held.remaining());
        if self.term_deadline().is_none_or(|at| now < at) {
            return;
        }
        let kill_at = self.grace_period.kill_at(now, self.held_until());
        let signals = self.termination.on_expiring(kill_at);
        self.send(&GuardianMessage::Terminating(kill_at));
        self.signal_command(signals);
        if self.termination.is_lost() {
            let lock = self.held.any();
            while let Ok(change) = self.renewals.try_recv() {
                self.on_renewal_change(change);
            }
            let why = self.renewal_error.as_ref();
            let why = why.map(|why| format!(": {}", format::escape(why))).unwrap_or_default();
            report_termination(&format!("{lock} could not be renewed in time{why}"));
        }
    }

    fn on_renewal_change(&mut self, change: RenewalChange) {
        match change {
            RenewalChange::Failed { lock, why } => {
                self.on_renewal_missing(lock, &why);
                self.renewal_error = Some(why);
            }
            // While this process is stopped, it cannot renew, which is not the server's fault.
            RenewalChange::Overdue { .. } if clock::since_boot() < self.renewable_until => {}
            RenewalChange::Overdue { lock } => {
                self.on_renewal_missing(lock, "a renewal is overdue");
            }
            RenewalChange::Confirmed { lock } => {
                self.renewal_error = None;
                self.unrenewed.remove(&lock);
                if self.has_reported_outage && self.unrenewed.is_empty() {
                    self.has_reported_outage = false;
                    output::print_message(&format!("renewed {} again", self.held.all()));
                }
            }
        }
    }

    /// Reports the first renewal that is missing, so that an outage is known before it ends the
    /// command.
    fn on_renewal_missing(&mut self, lock: String, why: &str) {
        let says = format!("cannot renew lock {} ({})", format::quote(&lock), format::escape(why));
        self.unrenewed.insert(lock);
        if self.quiet || self.has_reported_outage || self.termination.has_exited() {
            return;
        }
        // Without a deadline, the command is being ended, or is stopped.
        let Some(at) = self.term_deadline() else { return };
        self.has_reported_outage = true;
        let left = format::duration(at.saturating_sub(clock::since_boot()));
        output::print_message(&format!(
            "{says}; the command is ended in {left} unless a renewal succeeds"
        ));
    }

    /// Handles a loss that the channel has not reported yet: after a suspension, the thread that
    /// reports losses may wake up later than this one.
    fn check_held(&mut self) {
        if !self.termination.is_lock_ending() && !self.held.is_held() {
            self.on_lost();
        }
    }

    /// Time at which the command must get SIGTERM, unless the lock is renewed first.
    fn term_deadline(&self) -> Option<Duration> {
        // A lost lock has no deadline, because the channel will report the loss in a moment. Nor
        // has a stopped command, which cannot do anything until `resume`.
        (self.held.is_held() && !self.termination.is_lock_ending() && !self.paused)
            .then(|| self.grace_period.term_at(self.held_until()).max(self.renewable_until))
    }

    fn held_until(&self) -> Duration {
        clock::since_boot().saturating_add(self.held.remaining())
    }

    fn on_signal(&mut self, signal: i32) {
        match signal {
            SIGCHLD => self.reap(),
            SIGCONT => self.resume(),
            signal => {
                self.last_forwarded =
                    Some((to_u8(signal), SignalOrigin::of_received(self.terminal.as_ref())));
                let signal = Signal::from_named_raw(signal);
                self.signal_command(signal.as_slice());
                // A stopped process receives these only after it continues.
                if signal.is_some_and(ends) {
                    self.group().send(&[Signal::CONT]);
                }
            }
        }
    }

    /// Handles all changes of state of the command and of adopted processes.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if pid != self.command {
                // `UNTRACED` also reports processes that stopped.
                if exit_of(status).is_some() && self.guardian.note_exit(pid) {
                    self.watchdog = None;
                }
            } else if let Some(exit) = exit_of(status) {
                let had_terminal = self.terminal.as_mut().is_some_and(Terminal::reclaim);
                self.signal_origin = match self.last_forwarded {
                    Some((signal, origin)) if exit == Exit::Signal(signal) => origin,
                    // Signals that the terminal sends to a command in its foreground do not reach
                    // this process.
                    _ if had_terminal => SignalOrigin::TtyToCommand,
                    _ => SignalOrigin::NotTty,
                };
                self.termination.on_exit(exit);
            } else if let Some(signal) = status.stopping_signal() {
                self.on_stopped(signal);
            }
        }
    }

    fn on_stopped(&mut self, signal: i32) {
        let group = self.group();
        let Some(terminal) = &mut self.terminal else { return };
        match terminal.on_stopped(signal) {
            StopReaction::GiveTerminal => {
                terminal.give_to(group);
                group.send(&[Signal::CONT]);
            }
            StopReaction::StopToo => {
                self.paused = true;
                self.send(&GuardianMessage::Paused);
                // Stop the whole group, because only some of its processes may have stopped, and
                // from here on the lock is not renewed.
                group.send(&[Signal::STOP]);
                // This stops the whole job, including this process, which gets SIGCONT when the job
                // is continued.
                if kill_current_process_group(Signal::STOP).is_err() {
                    self.resume();
                }
            }
            StopReaction::Continue => group.send(&[Signal::CONT]),
            StopReaction::Ignore if wants_terminal(signal) => output::print_message(
                "the command is stopped: it wants to use the terminal, but distlock is not in its \
                 foreground; end it, and start it in the foreground or with another input",
            ),
            StopReaction::Ignore => {}
        }
    }

    /// Continues a group of which only some processes are stopped. A terminal stops the processes
    /// of a group one after the other, so some may stop after the first has been continued. And if
    /// a shell is stopped between forking and starting a command, that command never starts.
    fn resume_stopped_members(&mut self, now: Duration) {
        if self.terminal.is_none() || now < self.next_stop_check {
            return;
        }
        self.next_stop_check = now.saturating_add(STOP_CHECK_INTERVAL);
        if !has_job_control_parent() && self.group().is_partly_stopped() {
            self.group().send(&[Signal::CONT]);
        }
    }

    /// Continues the command, because this process was continued, unless the lock was lost
    /// meanwhile.
    fn resume(&mut self) {
        self.next_heartbeat = clock::since_boot();
        if self.paused {
            self.paused = false;
            let chance = self.held.remaining() / 2;
            self.renewable_until = self.next_heartbeat.saturating_add(chance);
        }
        let group = self.group();
        if let Some(terminal) = &mut self.terminal {
            terminal.give_if_wanted(group);
        }
        if self.held.is_held() {
            group.send(&[Signal::CONT]);
        }
    }

    fn on_lost(&mut self) {
        // The channel reports a loss only once.
        self.lost = never();
        let ((lock, why), now) = (self.held.loss(), clock::since_boot());
        let kill_at = match why {
            // The lock may have another holder whatever we do, and the command may have much to
            // clean up.
            LockLost::Gone | LockLost::ConnectionLost | LockLost::Taken { .. } => {
                now.saturating_add(self.grace_period.grace)
            }
            _ => now,
        };
        let was_lost = self.termination.is_lost();
        let signals = self.termination.on_lost(kill_at);
        self.send(&GuardianMessage::Terminating(kill_at));
        self.signal_command(signals);
        if was_lost {
            return;
        }
        report_termination(&format!("{lock} was lost: {}", format::escape(&why.to_string())));
    }
}

const OUT_OF_REACH: &str = "cannot end the command: its processes run as another user, and \
                            distlock may not send signals to them; they may outlive the lock";

/// Whether a signal asks processes to end.
fn ends(signal: Signal) -> bool {
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM].contains(&signal)
}

/// Maximum number of pids in a message.
const PIDS_SHOWN_MAX: usize = 5;

fn describe_stragglers(pids: &[i32]) -> String {
    let shown = pids.iter().take(PIDS_SHOWN_MAX).map(i32::to_string).collect::<Vec<_>>().join(", ");
    let more = if pids.len() > PIDS_SHOWN_MAX { ", …" } else { "" };
    match pids.len() {
        0 => "the command has ended but left processes that are hidden from distlock; ending them"
            .into(),
        1 => format!("the command has ended but left 1 process (pid {shown}); ending it"),
        count => {
            format!(
                "the command has ended but left {count} processes (pid {shown}{more}); ending them"
            )
        }
    }
}

fn report_termination(why: &str) {
    output::print_message(&format!("{why}; ending the command"));
}

fn exit_of(status: WaitStatus) -> Option<Exit> {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(Exit::Code(to_u8(code))),
        (None, Some(signal)) => Some(Exit::Signal(to_u8(signal))),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_left_behind_are_named() {
        let says = |pids: &[i32]| {
            let text = describe_stragglers(pids);
            text.strip_prefix("the command has ended but left ").unwrap().to_owned()
        };
        assert_eq!(says(&[7]), "1 process (pid 7); ending it");
        assert_eq!(says(&[7, 8]), "2 processes (pid 7, 8); ending them");
        let many = "6 processes (pid 1, 2, 3, 4, 5, …); ending them";
        assert_eq!(says(&[1, 2, 3, 4, 5, 6]), many);
        assert_eq!(says(&[]), "processes that are hidden from distlock; ending them");
    }
}
