//! `distlock top`: the locks, live, on the whole screen. Asks, draws, and does what keys say.

mod detail;
mod events;
mod feed;
mod history;
mod keys;
mod model;
mod rows;
mod terminal;
mod view;

use std::{io, time::Duration};

use distlock::RedisMgr;
use ratatui::crossterm::event::Event as Input;
use rustix::process::{Signal, kill_current_process_group};
use signal_hook::consts::SIGTSTP;

use self::{
    events::{Event, Events},
    feed::{Feed, Look, Pace},
    model::{Model, Order},
    terminal::Screen,
    view::Palette,
};
use crate::{
    args::{Servers, Top},
    clock, connect,
    exit::{Exit, Failure, Outcome},
    job::somebody_could_wake_us,
    text,
};

const INTERVAL_MIN: Duration = Duration::from_millis(50);
const INTERVAL_MAX: Duration = Duration::from_secs(3_600);

pub(crate) fn run(servers: &Servers, options: &Top) -> Outcome {
    if !(INTERVAL_MIN..=INTERVAL_MAX).contains(&options.interval) {
        let [least, most, given] = [INTERVAL_MIN, INTERVAL_MAX, options.interval].map(text::span);
        return Err(Failure::usage(format!("--interval is {given}, and has to be {least} to {most}")));
    }
    if !terminal::is_there() {
        return Err(Failure::usage(
            "top needs a terminal on standard input and output; use `distlock ls` to list the locks once",
        ));
    }
    let mgr = connect::manager(servers)?;
    watch(&mgr, options).unwrap_or_else(|error| {
        Err(Failure::new(Exit::CannotRun, format!("cannot use this terminal: {error}; try `distlock ls`")))
    })
}

fn watch(mgr: &RedisMgr, options: &Top) -> io::Result<Outcome> {
    // What is logged to this terminal would stand in the middle of the picture.
    if io::IsTerminal::is_terminal(&io::stderr()) {
        log::set_max_level(log::LevelFilter::Off);
    }
    let pace = Pace { interval: options.interval, paused: false };
    let events = Events::start(Feed::start(mgr, &options.pattern, pace)?)?;
    let mut model = Model::new(mgr.server().to_owned(), options.pattern.clone(), options.interval);
    let palette = Palette::from_env();
    let mut screen = Screen::enter()?;
    loop {
        screen.draw(|frame| view::draw(frame, &mut model, clock::now(), palette))?;
        let order = match events.next() {
            Event::Input(Input::Key(key)) => keys::action(model.mode, key).and_then(|action| model.act(action)),
            Event::Input(Input::Paste(text)) => {
                model.paste(&text);
                None
            }
            Event::Look(Look::Seen(picture)) => model.see(picture),
            Event::Look(Look::Failed { why, at }) => {
                model.miss(why, at);
                None
            }
            Event::Look(Look::Wrong(failure)) => return Ok(Err(failure)),
            Event::Told(told) => model.hear(told, clock::now()),
            Event::Signal(SIGTSTP) => Some(Order::Suspend),
            Event::Signal(signal) => Some(Order::Quit(Exit::Signal(u8::try_from(signal).unwrap_or(u8::MAX)))),
            Event::Unplugged(error) => return Err(error),
            // A new size is seen when drawing.
            Event::Input(_) | Event::Tick => None,
        };
        match order {
            None => {}
            Some(Order::Quit(exit)) => return Ok(Ok(exit)),
            // The whole job, as ^Z does where nobody takes it as a key. A shell waits for all of it.
            Some(Order::Suspend) if somebody_could_wake_us() => {
                screen.lend(|| Ok(kill_current_process_group(Signal::STOP)?))?;
            }
            Some(Order::Suspend) => {}
            Some(Order::Redraw) => screen.clear()?,
            Some(Order::LookNow) => events.feed().look_now(),
            Some(Order::Pace(pace)) => events.feed().pace(pace),
            Some(Order::Ask(ask)) => events.feed().ask(ask),
        }
    }
}
