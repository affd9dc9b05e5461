//! The table: what was measured, what it was to be, and how the two compare.

use std::{fmt, fs, mem, thread, time::Duration};

use crate::support::RedisServer;

/// A number with its unit.
#[derive(Clone, Copy)]
pub(crate) struct Quantity {
    value: f64,
    unit: &'static str,
}

pub(crate) fn micros(time: Duration) -> Quantity {
    Quantity { value: time.as_secs_f64() * 1e6, unit: "µs" }
}

pub(crate) fn per_second(count: f64, time: Duration) -> Quantity {
    Quantity { value: count / time.as_secs_f64(), unit: "/s" }
}

/// Processor time as a share of one core.
pub(crate) fn of_a_core(cpu: Duration, time: Duration) -> Quantity {
    Quantity { value: 100.0 * cpu.as_secs_f64() / time.as_secs_f64(), unit: "% of a core" }
}

pub(crate) fn bytes(value: f64) -> Quantity {
    Quantity { value, unit: "B" }
}

pub(crate) fn number(value: f64) -> Quantity {
    Quantity { value, unit: "" }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quantity { value, unit } = self;
        let space = if unit.is_empty() || unit.starts_with('/') { "" } else { " " };
        let digits = match value.abs() {
            _ if value.fract() == 0.0 => 0,
            1000.0.. => 0,
            100.0.. => 1,
            10.0.. => 2,
            _ => 3,
        };
        write!(f, "{value:.digits$}{space}{unit}")
    }
}

enum Goal {
    AtMost(f64),
    Below(f64),
    AtLeast(f64),
    /// At most so many times the raw figure.
    TimesRaw(f64),
    /// The raw figure, give or take this share of it.
    LikeRaw(f64),
}

/// One figure of a row.
pub(crate) struct Line {
    what: String,
    measured: Quantity,
    raw: Option<(Quantity, &'static str)>,
    goal: Option<Goal>,
}

impl Line {
    pub(crate) fn new(what: impl Into<String>, measured: Quantity) -> Line {
        Line { what: what.into(), measured, raw: None, goal: None }
    }

    /// What the same costs without the library, or what the figure is to be compared with.
    pub(crate) fn beside(self, raw: Quantity, of: &'static str) -> Line {
        Line { raw: Some((raw, of)), ..self }
    }

    pub(crate) fn at_most(self, limit: f64) -> Line {
        Line { goal: Some(Goal::AtMost(limit)), ..self }
    }

    pub(crate) fn below(self, limit: f64) -> Line {
        Line { goal: Some(Goal::Below(limit)), ..self }
    }

    pub(crate) fn at_least(self, limit: f64) -> Line {
        Line { goal: Some(Goal::AtLeast(limit)), ..self }
    }

    pub(crate) fn at_most_times_raw(self, limit: f64) -> Line {
        Line { goal: Some(Goal::TimesRaw(limit)), ..self }
    }

    pub(crate) fn like_raw(self, tolerance: f64) -> Line {
        Line { goal: Some(Goal::LikeRaw(tolerance)), ..self }
    }

    fn goal(&self) -> String {
        let unit = |limit: f64| Quantity { value: limit, ..self.measured };
        match &self.goal {
            None => String::new(),
            Some(Goal::AtMost(limit)) => format!("at most {}", unit(*limit)),
            Some(Goal::Below(limit)) => format!("below {}", unit(*limit)),
            Some(Goal::AtLeast(limit)) => format!("at least {}", unit(*limit)),
            Some(Goal::TimesRaw(limit)) => format!("at most {limit:.2} x raw"),
            Some(Goal::LikeRaw(tolerance)) => format!("the same, within {} %", tolerance * 100.0),
        }
    }

    fn verdict(&self) -> String {
        let value = self.measured.value;
        let raw = self.raw.map_or(f64::NAN, |(raw, _)| raw.value);
        // By how much the figure misses its limit; negative when it does not.
        let (short, limit) = match self.goal {
            None => return String::new(),
            Some(Goal::AtMost(limit) | Goal::Below(limit)) => (value - limit, limit),
            Some(Goal::AtLeast(limit)) => (limit - value, limit),
            Some(Goal::TimesRaw(limit)) => (value - limit * raw, limit * raw),
            Some(Goal::LikeRaw(tolerance)) => ((value - raw).abs() - tolerance * raw, raw),
        };
        let met = if let Some(Goal::Below(_)) = self.goal { short < 0.0 } else { short <= 0.0 };
        if met {
            return "ok".into();
        }
        let by = Quantity { value: short, ..self.measured };
        if limit > 0.0 { format!("short by {by} ({:.1} %)", 100.0 * short / limit) } else { format!("short by {by}") }
    }

    fn cells(&self) -> [String; 6] {
        let raw = self.raw.map_or(String::new(), |(raw, of)| format!("{raw} {of}"));
        let ratio = self.raw.map_or(String::new(), |(raw, _)| format!("{:.3}", self.measured.value / raw.value));
        [self.what.clone(), self.goal(), self.measured.to_string(), raw, ratio, self.verdict()]
    }
}

#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<[String; 8]>,
}

impl Table {
    /// Adds a row, and how much of all cores other programs used while it was measured.
    pub(crate) fn add(&mut self, row: &str, lines: Vec<Line>, others: f64) {
        let (mut name, mut others) = (row.to_owned(), format!("{:.0} %", 100.0 * others));
        for line in lines {
            let [what, goal, measured, raw, ratio, verdict] = line.cells();
            let (name, others) = (mem::take(&mut name), mem::take(&mut others));
            self.rows.push([name, what, goal, measured, raw, ratio, verdict, others]);
        }
    }

    pub(crate) fn add_failed(&mut self, row: &str, why: &str) {
        let mut cells = [const { String::new() }; 8];
        cells[0] = row.to_owned();
        cells[1] = format!("CANNOT RUN: {}", why.lines().next().unwrap_or_default());
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = ["row", "what", "must be", "measured", "raw, same run", "ratio", "verdict", "others' load"]
            .map(str::to_owned);
        let width = |column: usize| {
            let cells = self.rows.iter().chain([&heads]).map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..heads.len()).map(width).collect();
        let rule = heads.clone().map(|_| String::new());
        for (cells, fill) in [(&heads, ' '), (&rule, '-')].into_iter().chain(self.rows.iter().map(|row| (row, ' '))) {
            let cells = cells.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
                let fill: String = std::iter::repeat_n(fill, width - cell.chars().count()).collect();
                // Numbers are compared more easily when they end below each other.
                if matches!(column, 3 | 5 | 7) { fill + cell } else { cell.clone() + &fill }
            });
            writeln!(f, "| {} |", cells.collect::<Vec<_>>().join(" | "))?;
        }
        Ok(())
    }
}

pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// What the figures were measured on.
pub(crate) fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cores = cores();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown processor");
    let info: String = RedisServer::start().query(&["INFO", "server"]);
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
    let server = field("valkey_version:").map(|version| format!("Valkey {version}"));
    let server = server.unwrap_or_else(|| format!("Redis {}", field("redis_version:").unwrap_or("?")));
    format!(
        "{cores} cores of {}, Linux {}, {server}",
        model.trim_start_matches([' ', '\t', ':']),
        read("/proc/sys/kernel/osrelease").trim(),
    )
}
