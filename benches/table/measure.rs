//! Clocks, processor time and memory, as the system tells them.

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

use hdrhistogram::Histogram;
use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
};

use crate::Result;

/// Time on a clock that all processes of this machine share.
pub(crate) fn now() -> Duration {
    read(ClockId::Monotonic)
}

/// The processor time that the calling thread has used.
pub(crate) fn thread_cpu() -> Duration {
    read(ClockId::ThreadCPUTime)
}

/// The processor time that this process has used.
pub(crate) fn own_cpu() -> Duration {
    read(ClockId::ProcessCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    // No clock in here is ever negative.
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Lets a measured period go by.
pub(crate) fn pause(period: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(period);
}

pub(crate) fn pause_until(moment: Duration) {
    pause(moment.saturating_sub(now()));
}

/// The processor time that the threads of another process have used. None of them may end between two readings.
pub(crate) fn cpu_of(pid: u32) -> Result<Duration> {
    threads_of(pid)?.iter().map(|thread| cpu_of_task(thread)).sum()
}

/// The same to a hundredth of a second, whatever threads have ended meanwhile.
pub(crate) fn cpu_of_process(pid: u32) -> Result<Duration> {
    seconds(&fields_after_name(&format!("/proc/{pid}/stat"))?, 11..13)
}

/// The same for its thread of this name.
pub(crate) fn cpu_of_thread(pid: u32, name: &str) -> Result<Duration> {
    // The kernel keeps this many bytes of a thread's name.
    let name = &name[..name.len().min(15)];
    for thread in threads_of(pid)? {
        if fs::read_to_string(thread.join("comm"))?.trim_end() == name {
            return cpu_of_task(&thread);
        }
    }
    Err(format!("process {pid} has no thread {name}").into())
}

fn threads_of(pid: u32) -> Result<Vec<PathBuf>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?;
    Ok(tasks.map(|task| task.map(|task| task.path())).collect::<std::io::Result<_>>()?)
}

fn cpu_of_task(task: &Path) -> Result<Duration> {
    // Unlike the numbers in `stat`, this one is in nanoseconds.
    let schedstat = fs::read_to_string(task.join("schedstat"))?;
    Ok(Duration::from_nanos(schedstat.split(' ').next().unwrap_or_default().parse()?))
}

/// The processor time that all cores have spent on anybody but this process and its children that have ended.
pub(crate) fn cpu_of_others() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/stat")?;
    let all: Vec<String> =
        stat.lines().next().into_iter().flat_map(str::split_ascii_whitespace).map(String::from).collect();
    // All but idle and iowait; what the hypervisor gave to others counts too.
    let busy = seconds(&all, 1..4)? + seconds(&all, 6..9)?;
    // utime, stime, cutime and cstime
    let own = seconds(&fields_after_name("/proc/self/stat")?, 11..15)?;
    Ok(busy.saturating_sub(own))
}

/// The fields of a line about a process, from its state on.
fn fields_after_name(path: &str) -> Result<Vec<String>> {
    let stat = fs::read_to_string(path)?;
    // The name stands in parentheses and may contain anything.
    let (_, fields) = stat.rsplit_once(')').ok_or("a process without a name")?;
    Ok(fields.split_ascii_whitespace().map(String::from).collect())
}

fn seconds(fields: &[String], range: Range<usize>) -> Result<Duration> {
    let fields = fields.get(range).ok_or("too few fields")?;
    let ticks: u64 = fields.iter().map(|field| field.parse::<u64>()).sum::<std::result::Result<u64, _>>()?;
    Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// Keeps the calling thread and servers where they are put, until it is dropped.
///
/// Left alone, the scheduler puts them on one core or on two, now so and now so, and a round trip takes three times as
/// long in the one case as in the other.
pub(crate) struct Placement {
    servers: Vec<Pid>,
    everywhere: CpuSet,
}

impl Placement {
    /// `None` where there are not two cores to choose from.
    pub(crate) fn apart(servers: &[u32]) -> Result<Option<Placement>> {
        Placement::at(servers, |cores| Some((*cores.first()?, *cores.get(1)?)))
    }

    pub(crate) fn together(servers: &[u32]) -> Result<Option<Placement>> {
        Placement::at(servers, |cores| Some((*cores.first()?, *cores.first()?)))
    }

    fn at(servers: &[u32], choose: impl Fn(&[usize]) -> Option<(usize, usize)>) -> Result<Option<Placement>> {
        let servers: Result<Vec<Pid>> = servers
            .iter()
            .map(|server| Pid::from_raw(i32::try_from(*server)?).ok_or_else(|| "no process has the number 0".into()))
            .collect();
        let servers = servers?;
        let everywhere = sched_getaffinity(None)?;
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| everywhere.is_set(*core)).collect();
        let Some((ours, theirs)) = choose(&cores) else { return Ok(None) };
        // Made before anything is moved, so that it is all moved back whatever happens.
        let placement = Placement { servers, everywhere };
        let moves = placement.servers.iter().map(|server| (Some(*server), theirs));
        for (process, core) in moves.chain([(None, ours)]) {
            let mut only = CpuSet::new();
            only.set(core);
            sched_setaffinity(process, &only)?;
        }
        Ok(Some(placement))
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        for process in self.servers.iter().copied().map(Some).chain([None]) {
            // A server that has ended needs no place.
            let _ = sched_setaffinity(process, &self.everywhere);
        }
    }
}

/// The memory of this process that is really there, in bytes.
pub(crate) fn own_memory() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS in /proc/self/status")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// Durations, kept to four digits.
pub(crate) struct Times(Histogram<u64>);

impl Times {
    pub(crate) fn new() -> Times {
        // From a nanosecond to a minute.
        Times(Histogram::new_with_bounds(1, 60_000_000_000, 4).expect("these are valid bounds"))
    }

    pub(crate) fn add(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn len(&self) -> u64 {
        self.0.len()
    }

    pub(crate) fn p50(&self) -> Duration {
        self.quantile(0.5)
    }

    pub(crate) fn p99(&self) -> Duration {
        self.quantile(0.99)
    }

    pub(crate) fn longest(&self) -> Duration {
        Duration::from_nanos(self.0.max())
    }

    fn quantile(&self, quantile: f64) -> Duration {
        Duration::from_nanos(self.0.value_at_quantile(quantile))
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
