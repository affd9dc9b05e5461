//! The timeline: which child held the lock when.

use std::collections::BTreeSet;

use distlock::LockId;

use super::{
    availability::NodeTimeline,
    report::Report,
    screen::{Palette, format_nanos},
};
use crate::history::{Event, Hold, Record};

const COLUMNS: u64 = 80;
/// Preferred maximum number of blocks, each of which is `COLUMNS` wide.
const BLOCKS_MAX: u64 = 4;
/// Possible durations of a column.
const COLUMN_MS: [u64; 9] = [50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000];
/// Maximum number of holds to list.
const LISTED_MAX: usize = 200;

const GAPS: &str = "
  Gaps without a holder: the lock of a child that was killed or stopped is free when the ttl has
  passed. If the next waiter in the queue is stopped, the lock is free when the claim window has
  passed (1 s, or the ttl if that is shorter).
";

const GAPS_OF_DATABASE: &str = "
  Gaps without a holder: the lock of a child that was stopped is free when the ttl has passed, in
  whole seconds, and the same again if the next waiter in the queue is stopped. The lock of a child
  that was killed is free at once.
";

const QUARANTINE: &str = "
  A server that lost its data may have forgotten the holder, so it does not vote until the longest
  ttl has passed. At the beginning all servers are new, and no child can acquire the lock. Later the
  other servers suffice.
";

/// What one child did, as pairs of start and end.
#[derive(Default)]
struct ChildTimeline<'a> {
    holds: Vec<&'a Hold>,
    waits: Vec<(u64, u64)>,
    stops: Vec<(u64, u64)>,
    kills: Vec<u64>,
    losses: Vec<u64>,
}

pub(crate) fn draw(records: &[Record], report: &Report<'_>, palette: Palette) -> String {
    let start = records.iter().map(|record| record.at).min().unwrap_or(0);
    let end = records.iter().map(|record| record.at).max().unwrap_or(0);
    let children: BTreeSet<u32> =
        records.iter().map(|record| record.seat).filter(|child| *child > 0).collect();
    let length = end - start + 1;
    let column = COLUMN_MS
        .into_iter()
        .map(|ms| ms * 1_000_000)
        .find(|column| length <= column * COLUMNS * BLOCKS_MAX);
    let column = column.unwrap_or_else(|| length.div_ceil(COLUMNS * BLOCKS_MAX));
    let timelines: Vec<(u32, ChildTimeline<'_>)> = children
        .into_iter()
        .map(|child| (child, child_timeline(child, records, report, end)))
        .collect();

    let scale = format!("one column is {}   ", format_nanos(column));
    let mut text = format!(
        "\n{}  {scale}{} holds  {} holds, but is stopped  {} waits  {} is stopped  \
         {} killed  {} notices its loss\n",
        palette.bold("Timeline"),
        palette.green('█'),
        palette.yellow('▒'),
        palette.dim('·'),
        palette.red('z'),
        palette.red('X'),
        palette.red('!')
    );
    if !report.availability.nodes.is_empty() {
        text.push_str(&format!(
            "{:>width$}{} votes  {} in quarantine  {} killed  {} is down\n",
            "nodes: ",
            palette.green('█'),
            palette.yellow('░'),
            palette.red('X'),
            palette.red('-'),
            width = "Timeline  ".len() + scale.len()
        ));
    }
    for block in 0..length.div_ceil(column * COLUMNS) {
        let from = start + block * column * COLUMNS;
        let columns = (end + 1 - from).div_ceil(column).min(COLUMNS);
        text.push_str(&format!(
            "\n           {}\n",
            palette.dim(ruler(from - start, column, columns))
        ));
        for (child, timeline) in &timelines {
            let cells: String = (0..columns)
                .map(|index| timeline.cell(from + index * column, column, palette))
                .collect();
            text.push_str(&format!("  child {child:<2} {cells}\n"));
        }
        for (timeline, node) in report.availability.nodes.iter().zip(1..) {
            let cell = |index| node_cell(timeline, from + index * column, column, palette);
            let cells: String = (0..columns).map(cell).collect();
            text.push_str(&format!("  node {node:<3} {cells}\n"));
        }
    }
    if !report.availability.nodes.is_empty() {
        text.push_str(&palette.dim(QUARANTINE));
    }
    if timelines
        .iter()
        .any(|(_, timeline)| !timeline.stops.is_empty() || !timeline.kills.is_empty())
    {
        let is_database = report.story.terms.is_database;
        text.push_str(&palette.dim(if is_database { GAPS_OF_DATABASE } else { GAPS }));
    }
    text.push_str(&list(report, start, palette));
    text
}

fn child_timeline<'a>(
    child: u32,
    records: &[Record],
    report: &Report<'a>,
    end: u64,
) -> ChildTimeline<'a> {
    let holds = report.story.holds.iter().filter(|hold| hold.seat == child).collect();
    let mut timeline = ChildTimeline { holds, ..ChildTimeline::default() };
    let (mut waiting, mut stopped) = (None, None);
    for record in records.iter().filter(|record| record.seat == child) {
        match record.event {
            Event::Wait => waiting = Some(record.at),
            Event::Enter { .. } => {
                timeline.waits.extend(waiting.take().map(|from| (from, record.at)))
            }
            Event::Stopped => stopped = Some(record.at),
            Event::Continued => timeline.stops.extend(stopped.take().map(|from| (from, record.at))),
            Event::Killed => {
                timeline.waits.extend(waiting.take().map(|from| (from, record.at)));
                timeline.kills.push(record.at);
            }
            Event::Lost { .. } => timeline.losses.push(record.at),
            _ => {}
        }
    }
    timeline.waits.extend(waiting.map(|from| (from, end)));
    timeline.stops.extend(stopped.map(|from| (from, end)));
    timeline
}

impl ChildTimeline<'_> {
    /// The character for the column that begins at `from`. The two halves of a column are checked
    /// in their middle. If one child follows another within a column, each of them shows its half.
    fn cell(&self, from: u64, column: u64, palette: Palette) -> String {
        let contains =
            |moments: &[u64]| moments.iter().any(|at| (from..from + column).contains(at));
        if contains(&self.kills) {
            return palette.red('X');
        }
        if contains(&self.losses) {
            return palette.red('!');
        }
        let within = |periods: &[(u64, u64)], at: u64| {
            periods.iter().any(|(from, until)| (*from..*until).contains(&at))
        };
        let holds = |at: u64| self.holds.iter().any(|hold| (hold.from..hold.until).contains(&at));
        let (left, middle, right) = (from + column / 4, from + column / 2, from + column * 3 / 4);
        let is_stopped = within(&self.stops, middle);
        match (holds(left), holds(right)) {
            (false, false) if is_stopped => palette.red('z'),
            (false, false) if within(&self.waits, middle) => palette.dim('·'),
            (false, false) => " ".into(),
            (_, _) if is_stopped => palette.yellow('▒'),
            (true, true) => palette.green('█'),
            (true, false) => palette.green('▌'),
            (false, true) => palette.green('▐'),
        }
    }
}

fn node_cell(timeline: &NodeTimeline, from: u64, column: u64, palette: Palette) -> String {
    let within = |periods: &[(u64, u64)]| {
        let middle = from + column / 2;
        periods.iter().any(|(from, until)| (*from..*until).contains(&middle))
    };
    if timeline.kills.iter().any(|at| (from..from + column).contains(at)) {
        palette.red('X')
    } else if within(&timeline.votes) {
        palette.green('█')
    } else if within(&timeline.quarantines) {
        palette.yellow('░')
    } else if timeline.kills.iter().any(|at| *at < from) {
        palette.red('-')
    } else {
        " ".into()
    }
}

fn ruler(from: u64, column: u64, columns: u64) -> String {
    let mut ruler = String::new();
    for index in (0..columns).step_by(10) {
        let label = format!("|{:.1} s", (from + index * column) as f64 / 1e9);
        ruler.push_str(&format!("{label:<10}"));
    }
    ruler.trim_end().to_owned()
}

fn list(report: &Report<'_>, start: u64, palette: Palette) -> String {
    let mut text = format!("\n{}  in the order of their holds\n\n", palette.bold("Holders"));
    text.push_str(&palette.dim("       from       for  child  token             end     id\n"));
    for hold in report.story.holds.iter().take(LISTED_MAX) {
        text.push_str(&format!(
            "  {:>7.3} s  {:>8}  {:<5}  {:<16}  {:<6}  {}\n",
            (hold.from - start) as f64 / 1e9,
            format_nanos(hold.until - hold.from),
            hold.seat,
            hold.token,
            hold.end.word(),
            palette.dim(shorten(&hold.id))
        ));
    }
    if report.story.holds.len() > LISTED_MAX {
        text.push_str(&format!("  and {} more\n", report.story.holds.len() - LISTED_MAX));
    }
    text
}

/// An id without most of its random part, which is too long for the table.
fn shorten(id: &str) -> String {
    match (id.parse::<LockId>(), id.rsplit_once('|')) {
        (Ok(_), Some((head, random))) => format!("{head}|{:.8}…", random),
        _ => id.to_owned(),
    }
}
