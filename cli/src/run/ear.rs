//! `Ear`: how a guardian hears its wrapper. That nothing is said is only believed when all that was said has been heard: a
//! guardian that was kept from running itself finds that its time has passed, and the words that came meanwhile.

use std::{os::fd::AsFd, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, read},
    time::Timespec,
};

use super::word::Word;
use crate::clock;

#[derive(Debug)]
pub(super) struct Ear<P> {
    pipe: P,
    /// Not yet taken for words.
    unread: Vec<u8>,
}

pub(super) enum Heard {
    Word(Word),
    /// Up to the time that was asked for.
    Nothing,
    /// The wrapper has ended.
    End,
}

impl<P: AsFd> Ear<P> {
    pub(super) fn new(pipe: P) -> Ear<P> {
        Ear { pipe, unread: Vec::new() }
    }

    /// The next word. Waits for it up to a time since boot.
    pub(super) fn next(&mut self, until: Option<Duration>) -> Heard {
        loop {
            while let Some(line) = self.line() {
                if let Some(word) = std::str::from_utf8(&line).ok().and_then(Word::parse) {
                    return Heard::Word(word);
                }
            }
            // Before the look at the pipe, which may take longer than it should.
            let left = until.map(|at| clock::timer(at, clock::since_boot()));
            match self.listen(left) {
                Ok(0) if left == Some(Duration::ZERO) => return Heard::Nothing,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return Heard::End,
            }
        }
    }

    fn line(&mut self) -> Option<Vec<u8>> {
        let end = self.unread.iter().position(|byte| *byte == b'\n')?;
        Some(self.unread.drain(..=end).collect())
    }

    /// How much more there is to read; waits for it so long.
    fn listen(&mut self, left: Option<Duration>) -> Result<usize, Errno> {
        let timer = left.map(Timespec::try_from).transpose().map_err(|_| Errno::INVAL)?;
        if poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], timer.as_ref())? == 0 {
            return Ok(0);
        }
        let mut part = [0; 4096];
        match read(&self.pipe, &mut part)? {
            0 => Err(Errno::PIPE),
            more => {
                self.unread.extend(&part[..more]);
                Ok(more)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, PipeWriter, Write as _};

    use super::*;

    /// What is heard until there is nothing more, by one whose time passed when the machine was started.
    fn late(told: impl FnOnce(PipeWriter) -> Option<PipeWriter>) -> (Vec<u64>, bool) {
        let (pipe, writer) = io::pipe().unwrap();
        let _open = told(writer);
        let mut ear = Ear::new(pipe);
        let mut heard = Vec::new();
        loop {
            match ear.next(Some(Duration::ZERO)) {
                Heard::Word(Word::HeldUntil(at)) => heard.push(at.as_secs()),
                Heard::Word(_) => unreachable!("that was not said"),
                Heard::Nothing => return (heard, false),
                Heard::End => return (heard, true),
            }
        }
    }

    fn tell(mut pipe: &PipeWriter, at: u64) {
        pipe.write_all(&Word::HeldUntil(Duration::from_secs(at)).line().unwrap()).unwrap();
    }

    #[test]
    fn all_that_was_said_is_heard_before_silence_is_believed() {
        let told = |pipe: PipeWriter| {
            (0..500).for_each(|at| tell(&pipe, at));
            Some(pipe)
        };
        assert_eq!(late(told), ((0..500).collect(), false));
        assert_eq!(late(Some), (vec![], false));
    }

    #[test]
    fn the_last_words_of_a_wrapper_are_heard_before_its_end() {
        let told = |pipe: PipeWriter| {
            (0..500).for_each(|at| tell(&pipe, at));
            (&pipe).write_all(b"half").unwrap();
            None
        };
        assert_eq!(late(told), ((0..500).collect(), true));
    }

    #[test]
    fn what_is_no_word_is_passed_over() {
        let told = |pipe: PipeWriter| {
            (&pipe).write_all(b"{\n\xff\n\n").unwrap();
            tell(&pipe, 7);
            (&pipe).write_all(b"half").unwrap();
            Some(pipe)
        };
        assert_eq!(late(told), (vec![7], false));
    }
}
