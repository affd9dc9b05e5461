//! What contenders write down about their holds, and what follows from it.

use std::{fmt::Write as _, fs, path::Path, sync::Mutex, time::Duration};

use crate::{Result, measure::Times};

/// One hold of the lock.
#[derive(Clone, Copy)]
struct Hold {
    token: u64,
    process: usize,
    acquired: Duration,
    released: Duration,
    /// How long it took to acquire the lock.
    waited: Duration,
    /// Whether the guard still reported the lock as held right before the release.
    was_held: bool,
}

/// What the contenders wrote down about the window.
pub(crate) struct Shares {
    pub(crate) locks: f64,
    /// Locks that were lost before they were released.
    pub(crate) lost: f64,
    pub(crate) handoff: Times,
    pub(crate) wait: Times,
    pub(crate) fewest: f64,
    pub(crate) most: f64,
}

/// Reads what the contenders wrote down. Fails if two of them held the lock at once.
pub(crate) fn read(
    folder: &Path,
    processes: usize,
    begin: Duration,
    end: Duration,
) -> Result<Shares> {
    let (holds, lost): (Vec<Hold>, Vec<Hold>) =
        read_holds(folder, processes)?.into_iter().partition(|hold| hold.was_held);
    check_exclusion(&holds)?;
    let within = |hold: &Hold| (begin..end).contains(&hold.acquired);
    let holds: Vec<Hold> = holds.into_iter().filter(within).collect();
    let mut by_process = vec![0_u32; processes];
    holds.iter().for_each(|hold| by_process[hold.process] += 1);
    let mut handoff = Times::new();
    for pair in holds.windows(2).filter(|pair| pair[0].process != pair[1].process) {
        handoff.add(pair[1].acquired - pair[0].released);
    }
    let mut wait = Times::new();
    holds.iter().for_each(|hold| wait.add(hold.waited));
    Ok(Shares {
        locks: holds.len() as f64,
        lost: lost.len() as f64,
        handoff,
        wait,
        fewest: by_process.iter().min().copied().unwrap_or(0).into(),
        most: by_process.iter().max().copied().unwrap_or(0).into(),
    })
}

/// The holds of all processes, in the order of their tokens.
fn read_holds(folder: &Path, processes: usize) -> Result<Vec<Hold>> {
    let mut holds = Vec::new();
    for process in 0..processes {
        for line in fs::read_to_string(folder.join(process.to_string()))?.lines() {
            let mut fields = line.split(' ').map(str::parse);
            let mut next = || fields.next().ok_or("a record is too short");
            let token = next()??;
            let mut time = || Ok::<_, Box<dyn std::error::Error>>(Duration::from_nanos(next()??));
            let (acquired, released, waited) = (time()?, time()?, time()?);
            holds.push(Hold {
                token,
                process,
                acquired,
                released,
                waited,
                was_held: next()?? == 1,
            });
        }
    }
    holds.sort_by_key(|hold| hold.token);
    Ok(holds)
}

/// Fails if two holds overlap: without exclusion, the speed means nothing.
fn check_exclusion(holds: &[Hold]) -> Result<()> {
    match holds
        .windows(2)
        .find(|pair| pair[1].acquired < pair[0].released || pair[1].token == pair[0].token)
    {
        None => Ok(()),
        Some(pair) => Err(format!(
            "two processes held the lock at once, with the tokens {} and {}",
            pair[0].token, pair[1].token
        )
        .into()),
    }
}

/// A hold: its token, its begin, its end, the wait before it, and whether it was held to the end.
pub(crate) type Written = (u64, Duration, Duration, Duration, bool);

pub(crate) fn write_down(holds: Vec<Written>, records: &Mutex<String>) -> Result<()> {
    let mut text = String::new();
    for (token, acquired, released, waited, was_held) in holds {
        let [acquired, released, waited] = [acquired, released, waited].map(|time| time.as_nanos());
        writeln!(text, "{token} {acquired} {released} {waited} {}", u8::from(was_held))?;
    }
    records.lock().map_err(|_| "a contender panicked")?.push_str(&text);
    Ok(())
}
