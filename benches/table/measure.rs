//! Clocks, processor time and memory, as the operating system reports them.

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

/// The time on a clock that all processes of this machine share.
pub(crate) fn now() -> Duration {
    read(ClockId::Monotonic)
}

/// The processor time that the calling thread has used.
pub(crate) fn thread_cpu() -> Duration {
    read(ClockId::ThreadCPUTime)
}

/// The processor time that this process has used.
pub(crate) fn process_cpu() -> Duration {
    read(ClockId::ProcessCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    // None of these clocks is ever negative.
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Sleeps.
pub(crate) fn pause(period: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(period);
}

pub(crate) fn pause_until(moment: Duration) {
    pause(moment.saturating_sub(now()));
}

/// The processor time that the threads of another process have used. None of its threads may end
/// between two calls.
pub(crate) fn cpu_of(pid: u32) -> Result<Duration> {
    threads_of(pid)?.iter().map(|thread| cpu_of_task(thread)).sum()
}

/// The processor time of another process, including ended threads, with a resolution of 10 ms.
pub(crate) fn cpu_of_process(pid: u32) -> Result<Duration> {
    seconds(&fields_after_name(&format!("/proc/{pid}/stat"))?, 11..13)
}

/// The processor time of the thread of another process that has this name.
pub(crate) fn cpu_of_thread(pid: u32, name: &str) -> Result<Duration> {
    // The kernel keeps the first 15 bytes of a thread's name.
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
    // In nanoseconds, unlike the numbers in `stat`.
    let schedstat = fs::read_to_string(task.join("schedstat"))?;
    Ok(Duration::from_nanos(schedstat.split(' ').next().unwrap_or_default().parse()?))
}

/// The processor time that all cores have spent on other processes. Children of this process count
/// as others until they have ended.
pub(crate) fn cpu_of_other_processes() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/stat")?;
    let all: Vec<String> = stat
        .lines()
        .next()
        .into_iter()
        .flat_map(str::split_ascii_whitespace)
        .map(String::from)
        .collect();
    // All fields but idle and iowait. Time that the hypervisor gave to other machines counts too.
    let busy = seconds(&all, 1..4)? + seconds(&all, 6..9)?;
    // utime, stime, cutime and cstime
    let own = seconds(&fields_after_name("/proc/self/stat")?, 11..15)?;
    Ok(busy.saturating_sub(own))
}

/// The fields of a `stat` file of a process, from its state on.
fn fields_after_name(path: &str) -> Result<Vec<String>> {
    let stat = fs::read_to_string(path)?;
    // The name is in parentheses and may contain any character.
    let (_, fields) = stat.rsplit_once(')').ok_or("a stat file without a process name")?;
    Ok(fields.split_ascii_whitespace().map(String::from).collect())
}

fn seconds(fields: &[String], range: Range<usize>) -> Result<Duration> {
    let fields = fields.get(range).ok_or("too few fields")?;
    let ticks: u64 =
        fields.iter().map(|field| field.parse::<u64>()).sum::<std::result::Result<u64, _>>()?;
    Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// Pins the calling thread and servers to cores until it is dropped.
///
/// Otherwise the scheduler uses one core or two, and changes between them. A round trip takes three
/// times as long in one case as in the other.
pub(crate) struct Placement {
    servers: Vec<Pid>,
    all_cores: CpuSet,
}

impl Placement {
    /// Puts this thread and the servers on different cores. `None` if only one core is available.
    pub(crate) fn different_cores(servers: &[u32]) -> Result<Option<Placement>> {
        Placement::at(servers, |cores| Some((*cores.first()?, *cores.get(1)?)))
    }

    /// Puts this thread and the servers on the same core.
    pub(crate) fn same_core(servers: &[u32]) -> Result<Option<Placement>> {
        Placement::at(servers, |cores| Some((*cores.first()?, *cores.first()?)))
    }

    fn at(
        servers: &[u32],
        choose: impl Fn(&[usize]) -> Option<(usize, usize)>,
    ) -> Result<Option<Placement>> {
        let servers: Result<Vec<Pid>> = servers
            .iter()
            .map(|server| {
                Pid::from_raw(i32::try_from(*server)?)
                    .ok_or_else(|| "no process has the pid 0".into())
            })
            .collect();
        let servers = servers?;
        let all_cores = sched_getaffinity(None)?;
        let cores: Vec<usize> =
            (0..CpuSet::MAX_CPU).filter(|core| all_cores.is_set(*core)).collect();
        let Some((ours, theirs)) = choose(&cores) else { return Ok(None) };
        // Created before the first process is pinned, so that dropping it unpins all of them after
        // an error.
        let placement = Placement { servers, all_cores };
        let pins = placement.servers.iter().map(|server| (Some(*server), theirs));
        for (process, core) in pins.chain([(None, ours)]) {
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
            // The server may have ended.
            let _ = sched_setaffinity(process, &self.all_cores);
        }
    }
}

/// The resident memory of this process, in bytes.
pub(crate) fn resident_memory() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .ok_or("no VmRSS in /proc/self/status")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// A histogram of durations, with four significant digits.
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

    pub(crate) fn max(&self) -> Duration {
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
