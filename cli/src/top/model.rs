//! `Model`: what the screen shows, and what keys, looks and answers make of it. Pure: it says what is to be done.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    exit::Exit,
    top::{
        detail::Detail,
        feed::{Ask, Freed, Pace, Told},
        history::Picture,
        keys::{Action, Mode, Step},
        rows::{Column, Row, Sorting, arrange},
    },
};

/// What one can choose between with + and -.
const INTERVALS: [Duration; 9] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
];
/// A pasted text is not longer than any name.
const FILTER_MAX: usize = 1_024;

/// What is to be done outside.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Quit(Exit),
    Suspend,
    Redraw,
    LookNow,
    Pace(Pace),
    Ask(Ask),
}

/// Why there is no newer picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trouble {
    pub(crate) since: Instant,
    pub(crate) why: String,
}

/// Something that was done, or could not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) text: String,
    pub(crate) good: bool,
    pub(crate) at: Instant,
}

/// The question before a release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) who: String,
}

/// The lock that is looked at closely.
#[derive(Debug)]
pub(crate) struct Inspected {
    pub(crate) name: String,
    /// What was told last: nobody holds it, somebody does, or it could not be found out.
    pub(crate) told: Option<Result<Option<Detail>, String>>,
    /// The first line that is shown.
    pub(crate) scroll: usize,
    asking: bool,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) servers: String,
    pub(crate) pattern: String,
    pub(crate) pace: Pace,
    pub(crate) picture: Option<Picture>,
    pub(crate) trouble: Option<Trouble>,
    /// When the servers were back, and how long they had been away.
    pub(crate) back: Option<(Instant, Duration)>,
    pub(crate) sorting: Sorting,
    pub(crate) filter: String,
    pub(crate) mode: Mode,
    pub(crate) inspected: Option<Inspected>,
    pub(crate) question: Option<Question>,
    pub(crate) notice: Option<Notice>,
    /// The rows that the filter lets pass, in order, as places in the picture.
    places: Vec<usize>,
    /// The selected row among them, and its name, which it is found by again.
    selected: usize,
    chosen: Option<Arc<str>>,
    /// The first row that is shown, and how many are.
    first: usize,
    height: usize,
}

impl Model {
    pub(crate) fn new(servers: String, pattern: String, interval: Duration) -> Model {
        Model {
            servers,
            pattern,
            pace: Pace { interval, paused: false },
            picture: None,
            trouble: None,
            back: None,
            sorting: Sorting { by: Column::Waiting, reversed: false },
            filter: String::new(),
            mode: Mode::Browse,
            inspected: None,
            question: None,
            notice: None,
            places: Vec::new(),
            selected: 0,
            chosen: None,
            first: 0,
            height: 1,
        }
    }

    /// The servers have answered.
    pub(crate) fn see(&mut self, picture: Picture) -> Option<Order> {
        if let Some(trouble) = self.trouble.take() {
            self.back = Some((picture.at, picture.at.saturating_duration_since(trouble.since)));
        }
        self.picture = Some(picture);
        self.arrange();
        self.inspect_again()
    }

    /// The servers have not answered.
    pub(crate) fn miss(&mut self, why: String, at: Instant) {
        self.back = None;
        let since = self.trouble.as_ref().map_or(at, |trouble| trouble.since);
        self.trouble = Some(Trouble { since, why });
    }

    /// An answer about one lock.
    pub(crate) fn hear(&mut self, told: Told, now: Instant) -> Option<Order> {
        match told {
            Told::Inspected { name, answer } => {
                if let Some(inspected) = self.inspected.as_mut().filter(|inspected| inspected.name == name) {
                    inspected.asking = false;
                    inspected.told = Some(answer);
                }
                None
            }
            Told::Released { name, answer } => {
                let (good, text) = match answer {
                    Ok(Freed::Yes) => (true, format!("released {name}")),
                    Ok(Freed::Gone) => (false, format!("{name} had no holder any more")),
                    Ok(Freed::Other(who)) => (false, format!("left alone: {name} is held by another now, {who}")),
                    Err(why) => (false, format!("could not release {name}: {why}")),
                };
                self.notice = Some(Notice { text: crate::text::clean(&text), good, at: now });
                Some(Order::LookNow)
            }
        }
    }

    /// Text that was pasted is typed, where there is a line for it, and no keys.
    pub(crate) fn paste(&mut self, text: &str) {
        if self.mode == Mode::Filter {
            text.lines().next().unwrap_or_default().chars().for_each(|letter| self.type_in(letter));
            self.arrange();
        }
    }

    pub(crate) fn act(&mut self, action: Action) -> Option<Order> {
        match action {
            Action::Quit => return Some(Order::Quit(Exit::Fine)),
            Action::Interrupt => return Some(Order::Quit(Exit::Signal(2))),
            Action::Suspend => return Some(Order::Suspend),
            Action::Redraw => return Some(Order::Redraw),
            Action::Move(step) => self.step(step),
            Action::NextColumn => self.sort(Sorting { by: self.sorting.by.next(), reversed: false }),
            Action::Reverse => self.sort(Sorting { reversed: !self.sorting.reversed, ..self.sorting }),
            Action::Filter => self.mode = Mode::Filter,
            Action::Type(letter) => {
                self.type_in(letter);
                self.arrange();
            }
            Action::RubOut => {
                self.filter.pop();
                self.arrange();
            }
            Action::Clear => self.clear_filter(),
            Action::Accept => self.mode = Mode::Browse,
            Action::Inspect => return self.inspect(),
            Action::Release => self.ask_first(),
            Action::Yes => return self.release(),
            Action::No => self.close_question(),
            Action::Pause => return Some(self.change_pace(Pace { paused: !self.pace.paused, ..self.pace })),
            Action::Slower => return Some(self.change_interval(next_above(self.pace.interval))),
            Action::Faster => return Some(self.change_interval(next_below(self.pace.interval))),
            Action::Help => self.mode = Mode::Help,
            Action::Back => return self.back_out(),
        }
        None
    }

    /// How many rows there are.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The row at a place of the table.
    pub(crate) fn row(&self, at: usize) -> Option<&Row> {
        self.picture.as_ref()?.rows.get(*self.places.get(at)?)
    }

    pub(crate) fn selected(&self) -> usize {
        self.selected
    }

    /// The rows to show where there is room for so many; the selected one is among them.
    pub(crate) fn window(&mut self, height: usize) -> Range<usize> {
        self.height = height.max(1);
        let last = self.len().saturating_sub(self.height);
        self.first = self.first.clamp((self.selected + 1).saturating_sub(self.height), self.selected).min(last);
        self.first..self.len().min(self.first + height)
    }

    fn arrange(&mut self) {
        let rows = self.picture.as_ref().map_or(&[][..], |picture| &picture.rows);
        arrange(rows, &self.filter, self.sorting, &mut self.places);
        let again = self.chosen.as_ref().and_then(|chosen| {
            self.places.iter().position(|place| rows.get(*place).is_some_and(|row| row.name == *chosen))
        });
        // A lock that is gone leaves its place to the next one.
        self.select(again.unwrap_or(self.selected));
    }

    fn select(&mut self, at: usize) {
        self.selected = at.min(self.len().saturating_sub(1));
        self.chosen = self.row(self.selected).map(|row| row.name.clone());
    }

    fn sort(&mut self, sorting: Sorting) {
        self.sorting = sorting;
        self.arrange();
    }

    fn step(&mut self, step: Step) {
        let stride = |at: usize, page: usize, last: usize| match step {
            Step::Up => at.saturating_sub(1),
            Step::Down => at.saturating_add(1),
            Step::PageUp => at.saturating_sub(page),
            Step::PageDown => at.saturating_add(page),
            Step::Home => 0,
            Step::End => last,
        };
        match (&mut self.inspected, self.mode) {
            // The view knows how many lines there are.
            (Some(inspected), Mode::Inspect) => inspected.scroll = stride(inspected.scroll, self.height, usize::MAX),
            (_, Mode::Browse | Mode::Filter) => self.select(stride(self.selected, self.height, self.len())),
            _ => {}
        }
    }

    fn type_in(&mut self, letter: char) {
        if !letter.is_control() && self.filter.len() + letter.len_utf8() <= FILTER_MAX {
            self.filter.push(letter);
        }
    }

    fn clear_filter(&mut self) {
        self.filter.clear();
        self.arrange();
    }

    fn inspect(&mut self) -> Option<Order> {
        let name = self.row(self.selected)?.name.to_string();
        self.inspected = Some(Inspected { name: name.clone(), told: None, scroll: 0, asking: true });
        self.mode = Mode::Inspect;
        Some(Order::Ask(Ask::Inspect { name }))
    }

    /// One question at a time, so that slow answers do not pile up.
    fn inspect_again(&mut self) -> Option<Order> {
        let inspected = self.inspected.as_mut().filter(|inspected| !inspected.asking)?;
        inspected.asking = true;
        Some(Order::Ask(Ask::Inspect { name: inspected.name.clone() }))
    }

    /// The question is about the holder that is on the screen at this moment.
    fn ask_first(&mut self) {
        let question = match &self.inspected {
            Some(Inspected { name, told: Some(Ok(Some(detail))), .. }) => {
                Some(Question { name: name.clone(), id: detail.id.clone(), who: detail.who.clone() })
            }
            Some(_) => None,
            None => self.row(self.selected).map(|row| Question {
                name: row.name.to_string(),
                id: row.id.to_string(),
                who: row.who(),
            }),
        };
        if question.is_some() {
            self.question = question;
            self.mode = Mode::Ask;
        }
    }

    fn release(&mut self) -> Option<Order> {
        let Question { name, id, .. } = self.question.clone()?;
        self.close_question();
        Some(Order::Ask(Ask::Release { name, id }))
    }

    fn close_question(&mut self) {
        self.question = None;
        self.mode = if self.inspected.is_some() { Mode::Inspect } else { Mode::Browse };
    }

    fn change_interval(&mut self, next: Option<Duration>) -> Order {
        self.change_pace(Pace { interval: next.unwrap_or(self.pace.interval), ..self.pace })
    }

    fn change_pace(&mut self, pace: Pace) -> Order {
        self.pace = pace;
        Order::Pace(pace)
    }

    fn back_out(&mut self) -> Option<Order> {
        match self.mode {
            Mode::Browse if self.filter.is_empty() => return Some(Order::Quit(Exit::Fine)),
            Mode::Browse | Mode::Filter => self.clear_filter(),
            Mode::Inspect => self.inspected = None,
            Mode::Ask => self.question = None,
            Mode::Help => {}
        }
        self.mode = Mode::Browse;
        None
    }
}

fn next_above(interval: Duration) -> Option<Duration> {
    INTERVALS.into_iter().find(|other| *other > interval)
}

fn next_below(interval: Duration) -> Option<Duration> {
    INTERVALS.into_iter().rev().find(|other| *other < interval)
}

#[cfg(test)]
mod tests;
