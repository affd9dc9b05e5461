//! `distlock top`: shows the locks live on the whole screen. This module runs the event loop.

mod detail;
mod events;
mod history;
mod keys;
mod model;
mod poller;
mod rows;
mod terminal;
mod view;

use std::io;

use distlock::RedisMgr;
use ratatui::crossterm::event::Event as Input;
use rustix::process::{Signal, kill_current_process_group};
use signal_hook::consts::SIGTSTP;

use self::{
    events::{Event, Events},
    model::{Effect, Model},
    poller::{PollRate, PollResult, Poller},
    terminal::Screen,
    view::Palette,
};
use crate::{
    args::{Servers, Top},
    clock, connect,
    exit::{Exit, Failure, Outcome},
    job_control::has_job_control_parent,
    ranges,
};

pub(crate) fn run(servers: &Servers, options: &Top) -> Outcome {
    ranges::check("--interval", options.interval, &ranges::INTERVAL)?;
    let why_not = "for MySQL, run: watch -n 1 distlock ls";
    let config = connect::config(servers)?.redis_only("top", why_not)?;
    if !terminal::has_terminal() {
        return Err(Failure::usage(
            "top needs a terminal as standard input and output; `distlock ls` lists the locks once",
        ));
    }
    let mgr = RedisMgr::new(config)?;
    run_screen(&mgr, options).unwrap_or_else(|error| {
        Err(Failure::new(
            Exit::CannotRun,
            format!("cannot use this terminal: {error}; try `distlock ls`"),
        ))
    })
}

fn run_screen(mgr: &RedisMgr, options: &Top) -> io::Result<Outcome> {
    // Log messages on the same terminal would spoil the screen.
    if io::IsTerminal::is_terminal(&io::stderr()) {
        log::set_max_level(log::LevelFilter::Off);
    }
    let rate = PollRate { interval: options.interval, paused: false };
    let events = Events::start(Poller::start(mgr, &options.pattern, rate)?)?;
    let mut model = Model::new(mgr.server().to_owned(), options.pattern.clone(), options.interval);
    let palette = Palette::from_env();
    let mut screen = Screen::enter()?;
    loop {
        screen.draw(|frame| view::draw(frame, &mut model, clock::now(), palette))?;
        let effect = match events.next() {
            Event::Input(Input::Key(key)) => {
                keys::action_for(model.mode, key).and_then(|action| model.on_action(action))
            }
            Event::Input(Input::Paste(text)) => {
                model.paste(&text);
                None
            }
            Event::Poll(PollResult::Table(data)) => model.on_snapshot(data),
            Event::Poll(PollResult::Failed { why, at }) => {
                model.on_poll_error(why, at);
                None
            }
            Event::Poll(PollResult::Invalid(failure)) => return Ok(Err(failure)),
            Event::Query(result) => model.on_result(result, clock::now()),
            Event::Signal(SIGTSTP) => Some(Effect::Suspend),
            Event::Signal(signal) => {
                Some(Effect::Quit(Exit::Signal(u8::try_from(signal).unwrap_or(u8::MAX))))
            }
            Event::InputClosed(error) => return Err(error),
            // Drawing takes a new window size into account.
            Event::Input(_) | Event::Tick => None,
        };
        match effect {
            None => {}
            Some(Effect::Quit(exit)) => return Ok(Ok(exit)),
            // Stops the whole job, as ^Z usually does, because a shell waits for all of it.
            Some(Effect::Suspend) if has_job_control_parent() => {
                screen.suspend(|| Ok(kill_current_process_group(Signal::STOP)?))?;
            }
            Some(Effect::Suspend) => {}
            Some(Effect::Redraw) => screen.clear()?,
            Some(Effect::PollNow) => events.poller().poll_now(),
            Some(Effect::SetRate(rate)) => events.poller().set_rate(rate),
            Some(Effect::Query(query)) => events.poller().query(query),
        }
    }
}
