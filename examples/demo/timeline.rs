//! The picture: who held the lock when.

use std::collections::BTreeSet;

use distlock::LockId;

use super::{
    availability,
    judge::Verdict,
    screen::{Palette, span},
};
use crate::history::{Event, Hold, Record};

const COLUMNS: u64 = 80;
const BLOCKS: u64 = 4;
/// How much time a column may stand for.
const SCALES_MS: [u64; 9] = [50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000];
/// More holds than this are not listed one by one.
const LISTED: usize = 200;

const GAPS: &str = "
  When nobody holds it: the lock of one that was killed or stopped is free when its lease has run out;
  a stopped one whose turn has come holds up the line until its claim runs out (1 s, or the lease).
";

const QUARANTINE: &str = "
  A server that has lost its memory does not vote until the longest lease has passed, for it may have forgotten whom
  it gave the lock to. So nobody holds it at first, when all servers are fresh; later the others suffice.
";

/// One child, as spans of time.
#[derive(Default)]
struct Track<'a> {
    holds: Vec<&'a Hold>,
    waits: Vec<(u64, u64)>,
    stops: Vec<(u64, u64)>,
    kills: Vec<u64>,
    losses: Vec<u64>,
}

pub(crate) fn draw(records: &[Record], verdict: &Verdict<'_>, palette: Palette) -> String {
    let start = records.iter().map(|record| record.at).min().unwrap_or(0);
    let end = records.iter().map(|record| record.at).max().unwrap_or(0);
    let children: BTreeSet<u32> = records.iter().map(|record| record.seat).filter(|child| *child > 0).collect();
    let length = end - start + 1;
    let column = SCALES_MS.into_iter().map(|ms| ms * 1_000_000).find(|column| length <= column * COLUMNS * BLOCKS);
    let column = column.unwrap_or_else(|| length.div_ceil(COLUMNS * BLOCKS));
    let tracks: Vec<(u32, Track<'_>)> =
        children.into_iter().map(|child| (child, track(child, records, verdict, end))).collect();

    let scale = format!("one column is {}   ", span(column));
    let mut text = format!(
        "\n{}  {scale}{} holds  {} holds, but stopped  {} waits  {} stopped  {} killed  {} sees its loss\n",
        palette.bold("Timeline"),
        palette.green('█'),
        palette.yellow('▒'),
        palette.dim('·'),
        palette.red('z'),
        palette.red('X'),
        palette.red('!')
    );
    if !verdict.nodes.tracks.is_empty() {
        text.push_str(&format!(
            "{:>width$}{} votes  {} is up, but in quarantine  {} killed  {} is away\n",
            "of nodes: ",
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
        text.push_str(&format!("\n           {}\n", palette.dim(ruler(from - start, column, columns))));
        for (child, track) in &tracks {
            let cells: String = (0..columns).map(|index| track.cell(from + index * column, column, palette)).collect();
            text.push_str(&format!("  child {child:<2} {cells}\n"));
        }
        for (track, node) in verdict.nodes.tracks.iter().zip(1..) {
            let cell = |index| node_cell(track, from + index * column, column, palette);
            let cells: String = (0..columns).map(cell).collect();
            text.push_str(&format!("  node {node:<3} {cells}\n"));
        }
    }
    if !verdict.nodes.tracks.is_empty() {
        text.push_str(&palette.dim(QUARANTINE));
    }
    if tracks.iter().any(|(_, track)| !track.stops.is_empty() || !track.kills.is_empty()) {
        text.push_str(&palette.dim(GAPS));
    }
    text.push_str(&list(verdict, start, palette));
    text
}

fn track<'a>(child: u32, records: &[Record], verdict: &Verdict<'a>, end: u64) -> Track<'a> {
    let mut track =
        Track { holds: verdict.story.holds.iter().filter(|hold| hold.seat == child).collect(), ..Track::default() };
    let (mut asked, mut stopped) = (None, None);
    for record in records.iter().filter(|record| record.seat == child) {
        match record.event {
            Event::Wait => asked = Some(record.at),
            Event::Enter { .. } => track.waits.extend(asked.take().map(|asked| (asked, record.at))),
            Event::Stopped => stopped = Some(record.at),
            Event::Continued => track.stops.extend(stopped.take().map(|stopped| (stopped, record.at))),
            Event::Killed => {
                track.waits.extend(asked.take().map(|asked| (asked, record.at)));
                track.kills.push(record.at);
            }
            Event::Lost { .. } => track.losses.push(record.at),
            _ => {}
        }
    }
    track.waits.extend(asked.map(|asked| (asked, end)));
    track.stops.extend(stopped.map(|stopped| (stopped, end)));
    track
}

impl Track<'_> {
    /// What stands for the time from `from` on. Half columns are looked at in their middle, so that of two children
    /// who follow each other within one column each shows its half.
    fn cell(&self, from: u64, column: u64, palette: Palette) -> String {
        let happened = |moments: &[u64]| moments.iter().any(|at| (from..from + column).contains(at));
        if happened(&self.kills) {
            return palette.red('X');
        }
        if happened(&self.losses) {
            return palette.red('!');
        }
        let within = |spans: &[(u64, u64)], at: u64| spans.iter().any(|(from, until)| (*from..*until).contains(&at));
        let holds = |at: u64| self.holds.iter().any(|hold| (hold.from..hold.until).contains(&at));
        let (left, middle, right) = (from + column / 4, from + column / 2, from + column * 3 / 4);
        let stopped = within(&self.stops, middle);
        match (holds(left), holds(right)) {
            (false, false) if stopped => palette.red('z'),
            (false, false) if within(&self.waits, middle) => palette.dim('·'),
            (false, false) => " ".into(),
            (_, _) if stopped => palette.yellow('▒'),
            (true, true) => palette.green('█'),
            (true, false) => palette.green('▌'),
            (false, true) => palette.green('▐'),
        }
    }
}

fn node_cell(track: &availability::Track, from: u64, column: u64, palette: Palette) -> String {
    let within = |spans: &[(u64, u64)]| {
        let middle = from + column / 2;
        spans.iter().any(|(from, until)| (*from..*until).contains(&middle))
    };
    if track.kills.iter().any(|at| (from..from + column).contains(at)) {
        palette.red('X')
    } else if within(&track.votes) {
        palette.green('█')
    } else if within(&track.quarantines) {
        palette.yellow('░')
    } else if track.kills.iter().any(|at| *at < from) {
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

fn list(verdict: &Verdict<'_>, start: u64, palette: Palette) -> String {
    let mut text = format!("\n{}  in the order of entering\n\n", palette.bold("Holders"));
    text.push_str(&palette.dim("       from       for  child  token             end     identifier\n"));
    for hold in verdict.story.holds.iter().take(LISTED) {
        text.push_str(&format!(
            "  {:>7.3} s  {:>8}  {:<5}  {:<16}  {:<6}  {}\n",
            (hold.from - start) as f64 / 1e9,
            span(hold.until - hold.from),
            hold.seat,
            hold.token,
            hold.end.word(),
            palette.dim(shortened(&hold.id))
        ));
    }
    if verdict.story.holds.len() > LISTED {
        text.push_str(&format!("  and {} more\n", verdict.story.holds.len() - LISTED));
    }
    text
}

/// An identifier without most of its random part, which would fill the line.
fn shortened(id: &str) -> String {
    match (id.parse::<LockId>(), id.rsplit_once('|')) {
        (Ok(_), Some((head, random))) => format!("{head}|{:.8}…", random),
        _ => id.to_owned(),
    }
}
