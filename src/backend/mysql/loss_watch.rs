//! `LossWatch`: a thread that notices at once when the server closes a connection that holds a
//! lock. On systems other than Linux, the next renewal notices.

use std::io;

/// Called with the numbers of sessions whose connections the server has closed.
pub(super) type OnClosed = Box<dyn Fn(&[u64]) + Send>;

#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) use self::linux::LossWatch;

#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux {
    use std::{
        os::{
            fd::{AsFd, OwnedFd},
            unix::net::UnixStream,
        },
        sync::Arc,
    };

    use rustix::{
        buffer::spare_capacity,
        event::epoll::{self, CreateFlags, EventData, EventFlags},
    };

    use super::{OnClosed, io};
    use crate::{
        backend::transport::{PollHandle, Transport},
        sys::threads,
    };

    /// Number of the pipe whose end stops the thread.
    const STOP: u64 = u64::MAX;
    /// Maximum number of connections that are reported together.
    const EVENTS_MAX: usize = 256;

    #[derive(Debug)]
    pub(in crate::backend::mysql) struct LossWatch {
        epoll: Arc<OwnedFd>,
        /// Closing it ends the thread.
        _stop: UnixStream,
    }

    impl LossWatch {
        pub(in crate::backend::mysql) fn start(on_closed: OnClosed) -> io::Result<LossWatch> {
            let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
            let (stop, stopped) = UnixStream::pair()?;
            watch(&epoll, STOP, &stopped, false)?;
            let watched = epoll.clone();
            threads::spawn("distlock-mysql", move || {
                let _stopped = stopped;
                run(&watched, &on_closed);
            })?;
            Ok(LossWatch { epoll, _stop: stop })
        }

        /// Watches a connection until it is closed, even if it was watched before.
        pub(in crate::backend::mysql) fn add(
            &self,
            number: u64,
            transport: &dyn Transport,
            again: bool,
        ) -> io::Result<()> {
            match transport.poll_handle() {
                PollHandle::Descriptor(descriptor) => watch(&self.epoll, number, descriptor, again),
                #[cfg(feature = "testing")]
                PollHandle::Simulated(_) => Ok(()),
            }
        }
    }

    /// Only the end of what the server sends is of interest, and only once.
    fn watch(epoll: &OwnedFd, number: u64, connection: impl AsFd, again: bool) -> io::Result<()> {
        let (flags, number) = (EventFlags::RDHUP | EventFlags::ONESHOT, EventData::new_u64(number));
        let result = if again {
            epoll::modify(epoll, connection, number, flags)
        } else {
            epoll::add(epoll, connection, number, flags)
        };
        Ok(result?)
    }

    fn run(epoll: &OwnedFd, on_closed: &OnClosed) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            events.clear();
            match epoll::wait(epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    log_safely!(
                        warn,
                        "lost locks in MySQL are noticed only by renewals from now on: {error}"
                    );
                    return;
                }
            }
            let closed: Vec<_> = events.iter().map(|event| event.data.u64()).collect();
            if closed.contains(&STOP) {
                return;
            }
            if !closed.is_empty() {
                on_closed(&closed);
            }
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
#[derive(Debug)]
pub(super) struct LossWatch;

#[cfg(not(any(target_os = "linux", target_os = "android")))]
impl LossWatch {
    pub(super) fn start(_: OnClosed) -> io::Result<LossWatch> {
        Ok(LossWatch)
    }

    pub(super) fn add(
        &self,
        _: u64,
        _: &dyn crate::backend::transport::Transport,
        _: bool,
    ) -> io::Result<()> {
        Ok(())
    }
}
