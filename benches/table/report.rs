//! The table of results: what was measured, its limit, and whether it was met.

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
pub(crate) fn share_of_core(cpu: Duration, time: Duration) -> Quantity {
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

enum Limit {
    AtMost(f64),
    Below(f64),
    AtLeast(f64),
    /// At most this multiple of the raw value.
    AtMostRawTimes(f64),
    /// At least this multiple of the raw value.
    AtLeastRawTimes(f64),
    /// Equal to the raw value, with this relative tolerance.
    SameAsRaw(f64),
}

/// A measured value, with its limit and the value to compare it with.
pub(crate) struct Figure {
    what: String,
    measured: Quantity,
    raw: Option<(Quantity, &'static str)>,
    limit: Option<Limit>,
}

impl Figure {
    pub(crate) fn new(what: impl Into<String>, measured: Quantity) -> Figure {
        Figure { what: what.into(), measured, raw: None, limit: None }
    }

    /// Adds the value without the library, or another one to compare with.
    pub(crate) fn compare(self, raw: Quantity, of: &'static str) -> Figure {
        Figure { raw: Some((raw, of)), ..self }
    }

    pub(crate) fn at_most(self, limit: f64) -> Figure {
        Figure { limit: Some(Limit::AtMost(limit)), ..self }
    }

    pub(crate) fn below(self, limit: f64) -> Figure {
        Figure { limit: Some(Limit::Below(limit)), ..self }
    }

    pub(crate) fn at_least(self, limit: f64) -> Figure {
        Figure { limit: Some(Limit::AtLeast(limit)), ..self }
    }

    pub(crate) fn at_most_raw_times(self, limit: f64) -> Figure {
        Figure { limit: Some(Limit::AtMostRawTimes(limit)), ..self }
    }

    pub(crate) fn at_least_raw_times(self, limit: f64) -> Figure {
        Figure { limit: Some(Limit::AtLeastRawTimes(limit)), ..self }
    }

    pub(crate) fn same_as_raw(self, tolerance: f64) -> Figure {
        Figure { limit: Some(Limit::SameAsRaw(tolerance)), ..self }
    }

    fn limit_text(&self) -> String {
        let unit = |limit: f64| Quantity { value: limit, ..self.measured };
        match &self.limit {
            None => String::new(),
            Some(Limit::AtMost(limit)) => format!("at most {}", unit(*limit)),
            Some(Limit::Below(limit)) => format!("below {}", unit(*limit)),
            Some(Limit::AtLeast(limit)) => format!("at least {}", unit(*limit)),
            Some(Limit::AtMostRawTimes(limit)) => format!("at most {limit:.2} x raw"),
            Some(Limit::AtLeastRawTimes(limit)) => format!("at least {limit:.2} x raw"),
            Some(Limit::SameAsRaw(tolerance)) => {
                format!("equal to raw, within {} %", tolerance * 100.0)
            }
        }
    }

    fn result(&self) -> String {
        let value = self.measured.value;
        let raw = self.raw.map_or(f64::NAN, |(raw, _)| raw.value);
        // By how much the value misses its limit; not positive if it meets the limit.
        let (excess, limit) = match self.limit {
            None => return String::new(),
            Some(Limit::AtMost(limit) | Limit::Below(limit)) => (value - limit, limit),
            Some(Limit::AtLeast(limit)) => (limit - value, limit),
            Some(Limit::AtMostRawTimes(limit)) => (value - limit * raw, limit * raw),
            Some(Limit::AtLeastRawTimes(limit)) => (limit * raw - value, limit * raw),
            Some(Limit::SameAsRaw(tolerance)) => ((value - raw).abs() - tolerance * raw, raw),
        };
        let is_met =
            if let Some(Limit::Below(_)) = self.limit { excess < 0.0 } else { excess <= 0.0 };
        if is_met {
            return "ok".into();
        }
        let by = Quantity { value: excess, ..self.measured };
        if limit > 0.0 {
            format!("missed by {by} ({:.1} %)", 100.0 * excess / limit)
        } else {
            format!("missed by {by}")
        }
    }

    fn cells(&self) -> [String; 6] {
        let raw = self.raw.map_or(String::new(), |(raw, of)| format!("{raw} {of}"));
        let ratio = self
            .raw
            .map_or(String::new(), |(raw, _)| format!("{:.3}", self.measured.value / raw.value));
        [self.what.clone(), self.limit_text(), self.measured.to_string(), raw, ratio, self.result()]
    }
}

#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<[String; 8]>,
}

impl Table {
    /// Adds a row. `others` is the share of all cores that other programs used meanwhile.
    pub(crate) fn add(&mut self, row: &str, figures: Vec<Figure>, others: f64) {
        let (mut name, mut others) = (row.to_owned(), format!("{:.0} %", 100.0 * others));
        for figure in figures {
            let [what, limit, measured, raw, ratio, result] = figure.cells();
            let (name, others) = (mem::take(&mut name), mem::take(&mut others));
            self.rows.push([name, what, limit, measured, raw, ratio, result, others]);
        }
    }

    pub(crate) fn add_failed(&mut self, row: &str, error: &str) {
        let mut cells = [const { String::new() }; 8];
        cells[0] = row.to_owned();
        cells[1] = format!("FAILED: {}", error.lines().next().unwrap_or_default());
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads =
            ["row", "what", "limit", "measured", "raw, same run", "ratio", "result", "other load"]
                .map(str::to_owned);
        let width = |column: usize| {
            let cells = self.rows.iter().chain([&heads]).map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..heads.len()).map(width).collect();
        let rule = heads.clone().map(|_| String::new());
        for (cells, fill) in
            [(&heads, ' '), (&rule, '-')].into_iter().chain(self.rows.iter().map(|row| (row, ' ')))
        {
            let cells = cells.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
                let fill: String =
                    std::iter::repeat_n(fill, width - cell.chars().count()).collect();
                // Numbers are aligned to the right.
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

/// The machine and the server of the measurements.
pub(crate) fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cores = cores();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or(": unknown processor");
    let info: String = RedisServer::start().query(&["INFO", "server"]);
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
    let server = field("valkey_version:").map(|version| format!("Valkey {version}"));
    let server =
        server.unwrap_or_else(|| format!("Redis {}", field("redis_version:").unwrap_or("?")));
    format!(
        "{cores} cores of {}, Linux {}, {server}",
        model.trim_start_matches([' ', '\t', ':']),
        read("/proc/sys/kernel/osrelease").trim(),
    )
}
