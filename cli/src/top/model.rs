//! `Model`: the state of the screen. Keys, polls and query results come in, effects go out. Pure.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    exit::Exit,
    top::{
        detail::LockDetail,
        history::TableData,
        keys::{Action, Mode, Movement},
        poller::{PollRate, Query, QueryResult, ReleaseResult},
        rows::{Column, Row, Sorting, filter_and_sort},
    },
};

/// The poll intervals that + and - choose from.
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
/// Maximum length of the filter, which is that of a lock name, because text can be pasted into it.
const FILTER_BYTES_MAX: usize = 1_024;

/// What the event loop must do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Quit(Exit),
    Suspend,
    Redraw,
    PollNow,
    SetRate(PollRate),
    Query(Query),
}

/// Why there is no newer data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outage {
    pub(crate) since: Instant,
    pub(crate) why: String,
}

/// The result of an action, for the footer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StatusMessage {
    pub(crate) text: String,
    pub(crate) good: bool,
    pub(crate) at: Instant,
}

/// A release that the user must confirm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Confirmation {
    pub(crate) name: String,
    pub(crate) ids: Vec<String>,
    pub(crate) holder: String,
}

/// The lock whose details are open.
#[derive(Debug)]
pub(crate) struct Inspected {
    pub(crate) name: String,
    /// The last result: the lock's details, `None` if it was not held, or an error.
    pub(crate) result: Option<Result<Option<Box<LockDetail>>, String>>,
    /// The first line that is shown.
    pub(crate) scroll: usize,
    is_pending: bool,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) servers: String,
    pub(crate) pattern: String,
    pub(crate) poll_rate: PollRate,
    pub(crate) data: Option<TableData>,
    pub(crate) outage: Option<Outage>,
    /// When the servers replied again, and how long the outage had lasted.
    pub(crate) recovered: Option<(Instant, Duration)>,
    pub(crate) sorting: Sorting,
    pub(crate) filter: String,
    pub(crate) mode: Mode,
    pub(crate) inspected: Option<Inspected>,
    pub(crate) confirmation: Option<Confirmation>,
    pub(crate) status: Option<StatusMessage>,
    /// The rows that match the filter, in display order, as positions in `data`.
    visible: Vec<usize>,
    /// The selected row's position in `visible`, and its name, by which it is found again after an
    /// update.
    selected: usize,
    selected_name: Option<Arc<str>>,
    /// The first row that is shown, and the number of rows on a page.
    first_shown: usize,
    page_rows: usize,
}

impl Model {
    pub(crate) fn new(servers: String, pattern: String, interval: Duration) -> Model {
        Model {
            servers,
            pattern,
            poll_rate: PollRate { interval, paused: false },
            data: None,
            outage: None,
            recovered: None,
            sorting: Sorting { by: Column::Waiting, reversed: false },
            filter: String::new(),
            mode: Mode::Browse,
            inspected: None,
            confirmation: None,
            status: None,
            visible: Vec::new(),
            selected: 0,
            selected_name: None,
            first_shown: 0,
            page_rows: 1,
        }
    }

    /// The servers have replied.
    pub(crate) fn on_snapshot(&mut self, data: TableData) -> Option<Effect> {
        if let Some(outage) = self.outage.take() {
            self.recovered = Some((data.at, data.at.saturating_duration_since(outage.since)));
        }
        self.data = Some(data);
        self.update_visible();
        self.refresh_inspected()
    }

    /// The servers have not replied.
    pub(crate) fn on_poll_error(&mut self, why: String, at: Instant) {
        self.recovered = None;
        let since = self.outage.as_ref().map_or(at, |outage| outage.since);
        self.outage = Some(Outage { since, why });
    }

    /// A query about one lock has a result.
    pub(crate) fn on_result(&mut self, result: QueryResult, now: Instant) -> Option<Effect> {
        match result {
            QueryResult::Inspected { name, result } => {
                if let Some(inspected) =
                    self.inspected.as_mut().filter(|inspected| inspected.name == name)
                {
                    inspected.is_pending = false;
                    inspected.result = Some(result);
                }
                None
            }
            QueryResult::Released { name, result } => {
                let (good, text) = match result {
                    Ok(ReleaseResult::Released) => (true, format!("released {name}")),
                    Ok(ReleaseResult::Partly { released, of, why }) => {
                        let done = format!("released {released} of {of} holders of {name}");
                        (false, format!("{done}, which is still held: {why}"))
                    }
                    Ok(ReleaseResult::Gone) => (false, format!("{name} was not held any more")),
                    Ok(ReleaseResult::HeldByOther(holder)) => {
                        (false, format!("not released: {name} is now held by {holder}"))
                    }
                    Err(why) => (false, format!("could not release {name}: {why}")),
                };
                self.status =
                    Some(StatusMessage { text: crate::format::escape(&text), good, at: now });
                Some(Effect::PollNow)
            }
        }
    }

    /// Pasted text goes into the filter if that is open, and never counts as keys.
    pub(crate) fn paste(&mut self, text: &str) {
        if self.mode == Mode::Filter {
            text.lines()
                .next()
                .unwrap_or_default()
                .chars()
                .for_each(|letter| self.type_char(letter));
            self.update_visible();
        }
    }

    pub(crate) fn on_action(&mut self, action: Action) -> Option<Effect> {
        match action {
            Action::Quit => return Some(Effect::Quit(Exit::Success)),
            Action::Interrupt => return Some(Effect::Quit(Exit::Signal(2))),
            Action::Suspend => return Some(Effect::Suspend),
            Action::Redraw => return Some(Effect::Redraw),
            Action::Move(movement) => self.move_by(movement),
            Action::NextColumn => {
                self.set_sorting(Sorting { by: self.sorting.by.next(), reversed: false })
            }
            Action::Reverse => {
                self.set_sorting(Sorting { reversed: !self.sorting.reversed, ..self.sorting })
            }
            Action::Filter => self.mode = Mode::Filter,
            Action::Type(letter) => {
                self.type_char(letter);
                self.update_visible();
            }
            Action::Backspace => {
                self.filter.pop();
                self.update_visible();
            }
            Action::Clear => self.clear_filter(),
            Action::Accept => self.mode = Mode::Browse,
            Action::Inspect => return self.inspect(),
            Action::Release => self.confirm_release(),
            Action::Yes => return self.release(),
            Action::No => self.close_confirmation(),
            Action::Pause => {
                return Some(
                    self.set_rate(PollRate { paused: !self.poll_rate.paused, ..self.poll_rate }),
                );
            }
            Action::Slower => {
                return Some(self.set_interval(longer_interval(self.poll_rate.interval)));
            }
            Action::Faster => {
                return Some(self.set_interval(shorter_interval(self.poll_rate.interval)));
            }
            Action::Help => self.mode = Mode::Help,
            Action::Back => return self.go_back(),
        }
        None
    }

    /// Number of rows that match the filter.
    pub(crate) fn len(&self) -> usize {
        self.visible.len()
    }

    /// The row at a position in display order.
    pub(crate) fn row(&self, at: usize) -> Option<&Row> {
        self.data.as_ref()?.rows.get(*self.visible.get(at)?)
    }

    pub(crate) fn selected(&self) -> usize {
        self.selected
    }

    /// The rows to show on a page of `height` rows, which include the selected one.
    pub(crate) fn window(&mut self, height: usize) -> Range<usize> {
        self.page_rows = height.max(1);
        let last = self.len().saturating_sub(self.page_rows);
        self.first_shown = self
            .first_shown
            .clamp((self.selected + 1).saturating_sub(self.page_rows), self.selected)
            .min(last);
        self.first_shown..self.len().min(self.first_shown + height)
    }

    fn update_visible(&mut self) {
        let rows = self.data.as_ref().map_or(&[][..], |data| &data.rows);
        filter_and_sort(rows, &self.filter, self.sorting, &mut self.visible);
        let position = self.selected_name.as_ref().and_then(|name| {
            self.visible.iter().position(|at| rows.get(*at).is_some_and(|row| row.name == *name))
        });
        // If the lock is gone, the next row takes its place.
        self.select(position.unwrap_or(self.selected));
    }

    fn select(&mut self, at: usize) {
        self.selected = at.min(self.len().saturating_sub(1));
        self.selected_name = self.row(self.selected).map(|row| row.name.clone());
    }

    fn set_sorting(&mut self, sorting: Sorting) {
        self.sorting = sorting;
        self.update_visible();
    }

    fn move_by(&mut self, movement: Movement) {
        let stride = |at: usize, page: usize, last: usize| match movement {
            Movement::Up => at.saturating_sub(1),
            Movement::Down => at.saturating_add(1),
            Movement::PageUp => at.saturating_sub(page),
            Movement::PageDown => at.saturating_add(page),
            Movement::Home => 0,
            Movement::End => last,
        };
        match (&mut self.inspected, self.mode) {
            // The view limits this to the number of lines.
            (Some(inspected), Mode::Inspect) => {
                inspected.scroll = stride(inspected.scroll, self.page_rows, usize::MAX)
            }
            (_, Mode::Browse | Mode::Filter) => {
                self.select(stride(self.selected, self.page_rows, self.len()))
            }
            _ => {}
        }
    }

    fn type_char(&mut self, letter: char) {
        if !letter.is_control() && self.filter.len() + letter.len_utf8() <= FILTER_BYTES_MAX {
            self.filter.push(letter);
        }
    }

    fn clear_filter(&mut self) {
        self.filter.clear();
        self.update_visible();
    }

    fn inspect(&mut self) -> Option<Effect> {
        let name = self.row(self.selected)?.name.to_string();
        self.inspected =
            Some(Inspected { name: name.clone(), result: None, scroll: 0, is_pending: true });
        self.mode = Mode::Inspect;
        Some(Effect::Query(Query::Inspect { name }))
    }

    /// Queries the open lock again, unless a query is pending, so that slow replies do not pile up.
    fn refresh_inspected(&mut self) -> Option<Effect> {
        let inspected = self.inspected.as_mut().filter(|inspected| !inspected.is_pending)?;
        inspected.is_pending = true;
        Some(Effect::Query(Query::Inspect { name: inspected.name.clone() }))
    }

    /// Asks for confirmation to release the lock from the holder that is on the screen now.
    fn confirm_release(&mut self) {
        let confirmation = match &self.inspected {
            Some(Inspected { name, result: Some(Ok(Some(detail))), .. }) => Some(Confirmation {
                name: name.clone(),
                ids: detail.ids.clone(),
                holder: detail.holder.clone(),
            }),
            Some(_) => None,
            None => self.row(self.selected).map(|row| Confirmation {
                name: row.name.to_string(),
                ids: row.ids(),
                holder: row.holder_name(),
            }),
        };
        if confirmation.is_some() {
            self.confirmation = confirmation;
            self.mode = Mode::Confirm;
        }
    }

    fn release(&mut self) -> Option<Effect> {
        let Confirmation { name, ids, .. } = self.confirmation.clone()?;
        self.close_confirmation();
        Some(Effect::Query(Query::Release { name, ids }))
    }

    fn close_confirmation(&mut self) {
        self.confirmation = None;
        self.mode = if self.inspected.is_some() { Mode::Inspect } else { Mode::Browse };
    }

    fn set_interval(&mut self, next: Option<Duration>) -> Effect {
        self.set_rate(PollRate {
            interval: next.unwrap_or(self.poll_rate.interval),
            ..self.poll_rate
        })
    }

    fn set_rate(&mut self, rate: PollRate) -> Effect {
        self.poll_rate = rate;
        Effect::SetRate(rate)
    }

    fn go_back(&mut self) -> Option<Effect> {
        match self.mode {
            Mode::Browse if self.filter.is_empty() => return Some(Effect::Quit(Exit::Success)),
            Mode::Browse | Mode::Filter => self.clear_filter(),
            Mode::Inspect => self.inspected = None,
            Mode::Confirm => self.confirmation = None,
            Mode::Help => {}
        }
        self.mode = Mode::Browse;
        None
    }
}

fn longer_interval(interval: Duration) -> Option<Duration> {
    INTERVALS.into_iter().find(|other| *other > interval)
}

fn shorter_interval(interval: Duration) -> Option<Duration> {
    INTERVALS.into_iter().rev().find(|other| *other < interval)
}

#[cfg(test)]
mod tests;
