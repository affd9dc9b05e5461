//! `Attempt`: one acquisition in progress: asks, waits for the grant, asks again.

use super::{
    Acquirer, WaitTerms,
    failures::{OutageReport, REPORT_AT_FAILURE, RetryDecision, RetryLimits, RetryState},
    poll_times::{ForeignHolds, follower_interval, next_poll, unsubscribed_poll_interval},
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Answer, Asking, Contention, NextStep, QueuePlace, QueueReport,
        error::BackendError,
    },
    core::{
        cancel::CancelToken,
        claim::{Grant, Residue},
        holder::Holder,
        kind::HeldBy,
    },
    error::{Action, LockError},
    sys::{
        clock::{self, Moment},
        display::Quoted,
    },
    wait::{WaitHandle, Wake},
};

pub(super) struct Attempt<'a> {
    ctx: &'a Acquirer,
    request: AcquireRequest<'a>,
    terms: WaitTerms<'a>,
    acquisition: Box<dyn Acquisition + 'a>,
    wait_handle: Option<WaitHandle>,
    /// Current run of failures; `None` once a request has had a usable result.
    retry: Option<RetryState>,
    holder: Option<Holder>,
    foreign: ForeignHolds,
    /// Another holder was reported at least once.
    contended: bool,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(
        ctx: &'a Acquirer,
        request: AcquireRequest<'a>,
        terms: WaitTerms<'a>,
    ) -> Attempt<'a> {
        Attempt {
            ctx,
            request,
            terms,
            acquisition: ctx.backend.acquisition(request),
            wait_handle: None,
            retry: None,
            holder: None,
            foreign: ForeignHolds::default(),
            contended: false,
        }
    }

    /// Returns the grant, and whether the lock was contended.
    pub(super) fn run(&mut self) -> Result<(Grant, bool), LockError> {
        if self.request.wait_deadline > self.terms.since && self.ctx.listener.is_subscribed() {
            // The subscription is up, so the first request can already join the queue if the lock
            // is held.
            self.ensure_wait_handle();
        }
        loop {
            self.check_cancelled()?;
            let place = self.ctx.listener.place();
            let ask_again_at: Option<Moment> = match self.ask(place) {
                Answer::Granted(grant) => return Ok((grant, self.contended)),
                Answer::WrongType => {
                    return Err(self.ctx.backend.wrong_type(&self.request.claim.key));
                }
                Answer::Undecided => continue,
                Answer::HeadOfQueue => {
                    self.retry = None;
                    continue;
                }
                Answer::Failed(error) => Some(self.on_failure(error)?),
                Answer::Contended(contention) => self.on_contention(contention)?,
            };
            if let Some(at) = ask_again_at
                && let Some(grant) = self.wait(at)?
            {
                return Ok((grant, self.contended));
            }
        }
    }

    fn ask(&mut self, place: Option<QueuePlace>) -> Answer {
        let answer = self.acquisition.ask(self.asking(), place);
        if let (Some(breaker), Answer::Granted(_) | Answer::Contended(_) | Answer::WrongType) =
            (&self.ctx.breaker, &answer)
        {
            breaker.on_reply();
        }
        answer
    }

    pub(super) fn residue(&self) -> Option<Residue> {
        self.acquisition.residue()
    }

    /// Queueing needs a subscription, because a hand-over skips waiters that the server cannot
    /// notify.
    fn asking(&self) -> Asking {
        if clock::now() >= self.request.wait_deadline {
            Asking::Last
        } else if self.wait_handle.is_some() && self.ctx.listener.is_subscribed() {
            Asking::Queue
        } else {
            Asking::Try
        }
    }

    /// Returns when to ask again; `None` for at once.
    fn on_contention(&mut self, contention: Contention) -> Result<Option<Moment>, LockError> {
        self.retry = None;
        if let Some(holder) = contention.holder {
            if !std::mem::replace(&mut self.contended, true) {
                self.warn_if_own(&holder);
                let (name, id) = (self.request.claim.key.name(), &self.request.claim.id);
                self.ctx.observer.contended(name, id, || holder.clone());
            }
            self.holder = Some(holder);
        }
        let wait_deadline = self.request.wait_deadline;
        let next = match contention.next {
            NextStep::AwaitGrant(report) => self.on_queued(&report),
            NextStep::AskAgainAt(at) => return Ok(Some(at)),
            NextStep::Queue { exists } => {
                let is_subscribed = self.ensure_wait_handle().ensure_subscribed(wait_deadline);
                if is_subscribed && exists { None } else { Some(self.unsubscribed_poll()) }
            }
            NextStep::GiveUp => return Err(self.timeout_error()),
        };
        // A reply that comes after the wait deadline leaves the last request to be sent.
        Ok(next.filter(|_| clock::now() < wait_deadline))
    }

    /// The guard may be on another thread by now, so this is no error.
    fn warn_if_own(&self, holder: &Holder) {
        if self.request.wait_deadline == Moment::NEVER && self.is_own(holder) {
            log_safely!(
                warn,
                "this thread waits for lock {}, which it has acquired itself; unless another \
                 thread releases it, this one waits forever",
                Quoted(self.request.claim.key.name())
            );
        }
    }

    /// Whether this thread has acquired the lock that it asks for.
    fn is_own(&self, holder: &Holder) -> bool {
        let own = &self.request.claim.id;
        let is_own = (holder.host(), holder.pid(), holder.tid())
            == (Some(own.host()), Some(own.pid()), Some(own.tid()));
        // Other holders can free permits of a semaphore.
        let is_alone = !matches!(holder.held_by(), HeldBy::Permits { .. });
        // Inside a process, a lock passes on with its id; and its release may not be confirmed yet.
        let is_held = || (self.terms.is_first_hold)(holder.id());
        is_own && is_alone && !holder.is_kept() && is_held()
    }

    fn on_queued(&mut self, report: &QueueReport) -> Option<Moment> {
        let (now, seed) = (clock::now(), self.jitter_seed());
        let foreign = &mut self.foreign;
        let next = Some(next_poll(now, &report.holder, report.position, foreign, seed));
        let Some(wait_handle) = &self.wait_handle else { return next };
        wait_handle.set_position(report.position);
        if report.was_lost {
            wait_handle.wake_same_lock_if_lost(report.position);
        }
        if !report.no_subscriber {
            return next;
        }
        // A hand-over would skip us, because the server has no subscriber on our channel.
        let resubscribed = wait_handle.invalidate_subscription(report.place, report.sent_at)
            && wait_handle.ensure_subscribed(self.request.wait_deadline);
        (!resubscribed).then(|| self.unsubscribed_poll())
    }

    fn unsubscribed_poll(&self) -> Moment {
        clock::now().saturating_add(unsubscribed_poll_interval(self.jitter_seed()))
    }

    /// Returns when to retry after a failure, or the error that ends the acquisition.
    fn on_failure(&mut self, error: BackendError) -> Result<Moment, LockError> {
        self.check_cancelled()?;
        let (now, jitter_seed) = (clock::now(), self.jitter_seed());
        let backend = &self.ctx.backend;
        let limits = RetryLimits {
            ttl: self.request.claim.ttl,
            outage_max: self.terms.outage_max,
            wait_deadline: self.request.wait_deadline,
            operation_timeout: backend.operation_timeout(),
            longest_silence: backend.longest_silence(),
            waits_in_queue: self.wait_handle.is_some() && self.ctx.listener.is_subscribed(),
            has_holder: self.holder.is_some(),
            failures_max: match &self.ctx.breaker {
                None => u32::MAX,
                Some(breaker) if breaker.is_open() => 1,
                Some(_) => REPORT_AT_FAILURE,
            },
        };
        let retry = self.retry.get_or_insert_with(|| RetryState::new(now));
        match retry.on_failure(error, &limits, now, jitter_seed) {
            RetryDecision::RetryAt { at, report } => {
                if retry.is_outage() {
                    (self.terms.on_outage)();
                }
                if let Some(report) = report {
                    self.report_outage(&report, now);
                }
                Ok(at)
            }
            RetryDecision::TimedOut => Err(self.timeout_error()),
            RetryDecision::Fail(error) => {
                if let Some(breaker) = &self.ctx.breaker {
                    breaker.on_failure(now, self.ctx.request_timeout(self.request.claim), &error);
                }
                Err(backend.lock_error(error, Action::Acquire, Some(self.request.claim.key.name())))
            }
        }
    }

    fn report_outage(&self, report: &OutageReport, now: Moment) {
        let (name, id) = (self.request.claim.key.name(), &self.request.claim.id);
        let gives_up_in = report.gives_up_at.duration_since(now);
        self.ctx.observer.retrying(name, id, &report.error, gives_up_in);
        // Each waiter fails at a time that counts from its own first failure, so the other waiters
        // must notice the outage now.
        if let Some(wait_handle) = &self.wait_handle
            && wait_handle.is_first_in_process()
            && !self.ctx.listener.is_subscribed()
        {
            wait_handle.wake_same_lock();
        }
    }

    fn ensure_wait_handle(&mut self) -> &WaitHandle {
        let Attempt { ctx, request, wait_handle, terms, .. } = self;
        let (lock, id) = (request.claim.key.lock_key(), request.claim.id.as_str());
        wait_handle
            .get_or_insert_with(|| WaitHandle::register(&ctx.listener, lock, id, terms.cancel))
    }

    /// Sleeps until it is time to ask again, or until the lock is granted.
    fn wait(&mut self, until: Moment) -> Result<Option<Grant>, LockError> {
        let (wait_deadline, call_deadline) =
            (self.request.wait_deadline, self.request.call_deadline);
        let asks_itself = self.retry.is_some() || self.acquisition.must_ask_itself();
        let until = until.min(self.acquisition.put_off_until());
        // Even a wait for a server to come back needs a handle, because a shutdown must wake it.
        let wait_handle = self.ensure_wait_handle();
        // One thread of the manager polls for all that wait for this lock. The others only check
        // regularly whether they have become the first.
        let next_check = || {
            let now = clock::now();
            let polls = asks_itself || now >= wait_deadline || wait_handle.is_first_in_process();
            let (position, seed) = (wait_handle.position(), wait_handle.number());
            (!polls).then(|| now.saturating_add(follower_interval(position, seed)))
        };
        let mut until = next_check().unwrap_or(until);
        loop {
            // After the wait deadline, requests continue until the call deadline.
            let bound = if clock::now() < wait_deadline { wait_deadline } else { call_deadline };
            match wait_handle.wait(until.min(bound)) {
                Wake::Granted(notice) => {
                    // A grant message confirms the claim window only.
                    let grant = if self.terms.whole_ttl {
                        None
                    } else {
                        self.acquisition.on_grant_message(notice)
                    };
                    if let (None, Some(wait_handle)) = (&grant, &self.wait_handle) {
                        // This thread now asks again, and keeps its handle. Another thread must
                        // read the subscription meanwhile.
                        wait_handle.promote_follower();
                    }
                    return Ok(grant);
                }
                Wake::Recheck => return Ok(None),
                Wake::Cancelled => return Err(self.cancelled_error()),
                Wake::Closed => return Err(LockError::Shutdown),
                Wake::Timeout => match next_check() {
                    Some(at) => until = at,
                    None => return Ok(None),
                },
            }
        }
    }

    fn timeout_error(&mut self) -> LockError {
        let name = self.request.claim.key.name().to_owned();
        let server = self.ctx.backend.label().clone();
        let holder = self.holder.take();
        let holder = holder.map(|holder| {
            let is_own = self.is_own(&holder);
            Box::new(holder.found_by(self.request.claim.kind, is_own))
        });
        match holder {
            Some(holder) if self.request.wait_deadline == self.terms.since => {
                LockError::Held { name, holder, server }
            }
            holder => LockError::Timeout {
                name,
                holder,
                waited: clock::now().duration_since(self.terms.since),
                server,
                behind_own_threads: false,
            },
        }
    }

    fn check_cancelled(&self) -> Result<(), LockError> {
        let is_cancelled = self.terms.cancel.is_some_and(CancelToken::is_cancelled);
        if is_cancelled { Err(self.cancelled_error()) } else { Ok(()) }
    }

    fn cancelled_error(&self) -> LockError {
        let waited = clock::now().duration_since(self.terms.since);
        LockError::Cancelled { name: self.request.claim.key.name().to_owned(), waited }
    }

    fn jitter_seed(&self) -> u64 {
        clock::now().as_nanos() ^ self.wait_handle.as_ref().map_or(0, WaitHandle::number)
    }
}
