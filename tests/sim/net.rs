//! The network and the servers at its other end: connections that keep their order, and lose, delay and hold what goes over
//! them.

use std::{collections::VecDeque, io};

use super::{
    node::{FakeNode, take_request},
    store::{Bytes, Keys},
    world::{Clock, Event, Life, MS, Sim, Time, US},
};

#[derive(Debug)]
enum Packet {
    Data(Bytes),
    /// Nothing more comes.
    End,
    Reset,
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Lane {
    /// Under way, with the moments of arrival.
    flying: VecDeque<(Time, Packet)>,
    /// Cannot get through.
    held: VecDeque<Packet>,
    last: Time,
}

#[derive(Debug, Default)]
pub(crate) struct Connection {
    process: usize,
    node: usize,
    loops: bool,
    out: Lane,
    back: Lane,
    /// What the client can read.
    inbox: VecDeque<u8>,
    ended: bool,
    reset: bool,
    /// The client has closed it.
    closed: bool,
    /// What the server has not made sense of yet.
    request: Bytes,
    /// The server has nothing to do with it any more.
    forgotten: bool,
    /// The client's end arrived while the server stood still.
    hung_up: bool,
    /// To be broken as soon as the server has carried out what comes next.
    breaks: bool,
}

/// How long things take between a process and a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) least: Time,
    pub(crate) most: Time,
    /// In a million: lost at first, and sent again after this long.
    pub(crate) loses: u32,
    pub(crate) again: Time,
    pub(crate) out_blocked: bool,
    pub(crate) back_blocked: bool,
}

impl Default for Link {
    fn default() -> Link {
        let (least, most, again) = (50 * US, 300 * US, 200 * MS);
        Link { least, most, loses: 0, again, out_blocked: false, back_blocked: false }
    }
}

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) fake: FakeNode,
    pub(crate) clock: Clock,
    pub(crate) up: bool,
    /// Stopped: it takes connections and requests, and does nothing.
    pub(crate) stopped: bool,
    /// When it was started, if anybody saw it.
    pub(crate) began: Time,
    /// When it forgot something.
    pub(crate) amnesia: Vec<Time>,
    /// What it would find on its disk.
    pub(crate) disk: Keys,
    pub(crate) served: u64,
}

impl Server {
    /// What its clock shows, in microseconds.
    pub(crate) fn now_us(&self, now: Time) -> u64 {
        self.clock.at(now) / 1_000
    }
}

#[derive(Debug, Default)]
pub(crate) struct Net {
    pub(crate) connections: Vec<Connection>,
    pub(crate) servers: Vec<Server>,
    /// For each process, to each node.
    pub(crate) links: Vec<Vec<Link>>,
    /// In a million requests: the connection breaks right after they were carried out.
    pub(crate) breaks: u32,
    /// Told of each key whose text has been written or deleted.
    pub(crate) touched: Vec<(usize, Bytes)>,
    /// Told of each lock that a node has given to who asked for it, by its identifier.
    pub(crate) given: Vec<(usize, String)>,
}

impl Net {
    pub(crate) fn loopback(&mut self) -> u64 {
        self.connections.push(Connection { loops: true, ..Connection::default() });
        self.connections.len() as u64 - 1
    }

    pub(crate) fn readable(&self, connections: &[u64]) -> Vec<bool> {
        let readable = |number: &u64| {
            let one = &self.connections[*number as usize];
            !one.inbox.is_empty() || one.ended || one.reset || one.closed
        };
        connections.iter().map(readable).collect()
    }

    pub(crate) fn read(&mut self, connection: u64, buffer: &mut [u8], peek: bool) -> io::Result<usize> {
        let one = &mut self.connections[connection as usize];
        let length = one.inbox.len().min(buffer.len());
        if length > 0 {
            for (to, from) in buffer.iter_mut().zip(&one.inbox) {
                *to = *from;
            }
            if !peek {
                one.inbox.drain(..length);
            }
            return Ok(length);
        }
        match one {
            Connection { reset: true, .. } => Err(io::ErrorKind::ConnectionReset.into()),
            Connection { ended: true, .. } | Connection { closed: true, .. } => Ok(0),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Sim {
    /// Connects the running thread to a node, named by its number.
    pub(crate) fn connect_to(&self, host: &str, deadline: Time) -> io::Result<u64> {
        let node: usize = host.trim_start_matches("10.0.0.").parse().expect("the number of a node");
        let process = self.process();
        loop {
            if self.is_over() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let link = self.net.borrow().links[process][node];
            let open = !link.out_blocked && !link.back_blocked;
            let lost = self.chance(link.loses);
            let trip = if lost { link.again } else { self.between(2 * link.least, 2 * link.most) };
            let left = deadline.saturating_sub(self.now.get());
            self.takes(process, node, trip / 2);
            if !open || trip >= left {
                self.sleep(left.min(if open { left } else { 20 * MS }));
                if self.now.get() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                continue;
            }
            self.sleep(trip);
            let mut net = self.net.borrow_mut();
            if !net.servers[node].up {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            net.connections.push(Connection { process, node, ..Connection::default() });
            return Ok(net.connections.len() as u64 - 1);
        }
    }

    pub(crate) fn send(&self, connection: u64, bytes: &[u8]) -> io::Result<usize> {
        let loops = {
            let mut net = self.net.borrow_mut();
            let breaks = net.breaks;
            let one = &mut net.connections[connection as usize];
            if one.closed || one.reset {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if one.loops {
                one.inbox.extend(bytes);
            } else {
                one.breaks = self.chance(breaks);
            }
            one.loops
        };
        if loops {
            self.readable(connection);
        } else if self.chance(20_000) && bytes.len() > 1 {
            // In two segments.
            let (first, second) = bytes.split_at(bytes.len() / 2);
            self.post(connection, true, Packet::Data(first.to_vec()));
            self.post(connection, true, Packet::Data(second.to_vec()));
        } else {
            self.post(connection, true, Packet::Data(bytes.to_vec()));
        }
        Ok(bytes.len())
    }

    /// The client closes it.
    pub(crate) fn hang_up(&self, connection: u64) {
        let lives = {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            !std::mem::replace(&mut one.closed, true) && !one.loops && !one.reset
        };
        if lives && !self.is_over() {
            self.post(connection, true, Packet::End);
        }
    }

    /// Puts something on its way.
    fn post(&self, connection: u64, out: bool, packet: Packet) {
        let link = {
            let net = self.net.borrow();
            let one = &net.connections[connection as usize];
            net.links[one.process][one.node]
        };
        let blocked = if out { link.out_blocked } else { link.back_blocked };
        let mut delay = self.between(link.least, link.most);
        if self.chance(link.loses) {
            delay += self.between(link.again / 2, link.again);
        }
        let mut net = self.net.borrow_mut();
        let one = &mut net.connections[connection as usize];
        let lane = if out { &mut one.out } else { &mut one.back };
        if blocked || !lane.held.is_empty() {
            lane.held.push_back(packet);
            return;
        }
        // One connection keeps its order.
        lane.last = lane.last.max(self.now.get() + delay);
        let at = lane.last;
        lane.flying.push_back((at, packet));
        let (process, node) = (one.process, one.node);
        drop(net);
        self.takes(process, node, at - self.now.get());
        self.schedule(at, Event::Arrive { connection, at_node: out });
    }

    /// A packet is under way between them for so long.
    fn takes(&self, process: usize, node: usize, span: Time) {
        let mut calm = self.calm.borrow_mut();
        if span > calm.usual {
            calm.trouble(process, node, self.now.get() + span);
        }
    }

    /// What could not get through goes on its way.
    pub(crate) fn unblock(&self, process: usize, node: usize) {
        let held: Vec<_> = {
            let mut net = self.net.borrow_mut();
            let link = &mut net.links[process][node];
            (link.out_blocked, link.back_blocked) = (false, false);
            let ours = |one: &Connection| !one.loops && (one.process, one.node) == (process, node);
            let numbered = net.connections.iter_mut().enumerate().filter(|(_, one)| ours(one));
            let take = |(number, one): (usize, &mut Connection)| {
                (number as u64, std::mem::take(&mut one.out.held), std::mem::take(&mut one.back.held))
            };
            numbered.map(take).collect()
        };
        for (connection, out, back) in held {
            out.into_iter().for_each(|packet| self.post(connection, true, packet));
            back.into_iter().for_each(|packet| self.post(connection, false, packet));
        }
    }

    pub(crate) fn arrive(&self, connection: u64, at_node: bool) {
        let packet = {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            let lane = if at_node { &mut one.out } else { &mut one.back };
            match lane.flying.front() {
                Some((at, _)) if *at <= self.now.get() => lane.flying.pop_front(),
                // It was cut off meanwhile.
                _ => None,
            }
        };
        match packet {
            Some((_, packet)) if at_node => self.at_node(connection, packet),
            Some((_, packet)) => self.at_client(connection, packet),
            None => {}
        }
    }

    fn at_client(&self, connection: u64, packet: Packet) {
        {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            match packet {
                Packet::Data(bytes) => one.inbox.extend(bytes),
                Packet::End => one.ended = true,
                Packet::Reset => one.reset = true,
            }
        }
        self.readable(connection);
    }

    fn at_node(&self, connection: u64, packet: Packet) {
        let answers = {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            if one.forgotten {
                matches!(packet, Packet::Data(_)).then_some(false)
            } else {
                match packet {
                    Packet::Data(bytes) => one.request.extend(bytes),
                    Packet::End | Packet::Reset => one.hung_up = true,
                }
                Some(true)
            }
        };
        match answers {
            Some(true) => self.serve(connection),
            // Whoever writes to nobody is told so.
            Some(false) => self.post(connection, false, Packet::Reset),
            None => {}
        }
    }

    /// A server does what has come over a connection.
    fn serve(&self, connection: u64) {
        loop {
            let now = self.now.get();
            let (outcome, breaks) = {
                let mut net = self.net.borrow_mut();
                let Net { connections, servers, touched, given, .. } = &mut *net;
                let one = &mut connections[connection as usize];
                let server = &mut servers[one.node];
                if server.stopped || !server.up || one.forgotten {
                    return;
                }
                let Some(request) = take_request(&mut one.request) else {
                    if std::mem::take(&mut one.hung_up) {
                        one.forgotten = true;
                        server.fake.hang_up(connection);
                    }
                    return;
                };
                server.served += 1;
                let now_us = server.now_us(now);
                let outcome = server.fake.answer(connection, &request, now_us);
                self.say(|| format!("        node {} is asked over {connection}: {}", one.node, asked(&request)));
                if outcome.reply.windows(6).any(|words| words == b" held ") && request.len() == 14 {
                    given.push((one.node, String::from_utf8_lossy(&request[7]).into_owned()));
                }
                touched.extend(outcome.touched.iter().map(|key| (one.node, key.clone())));
                (outcome, std::mem::take(&mut one.breaks))
            };
            self.say(|| format!("        node answers over {connection}: {}", shown(&outcome.reply)));
            for (peer, news) in outcome.news {
                self.post(peer, false, Packet::Data(news));
            }
            if breaks {
                self.break_off(connection);
                return;
            }
            self.post(connection, false, Packet::Data(outcome.reply));
        }
    }

    /// A connection breaks. What is under way is lost, from a moment on that differs between the directions.
    pub(crate) fn break_off(&self, connection: u64) {
        let cut = |lane: &mut Lane| {
            let keeps = self.rng.borrow_mut().usize(..=lane.flying.len());
            lane.flying.truncate(keeps);
            lane.held.clear();
        };
        {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            if one.loops {
                return;
            }
            cut(&mut one.out);
            cut(&mut one.back);
            self.calm.borrow_mut().trouble(one.process, one.node, self.now.get());
        }
        self.say(|| format!("connection {connection} breaks"));
        self.post(connection, true, Packet::Reset);
        self.post(connection, false, Packet::Reset);
    }

    /// The connections between living processes and a node.
    pub(crate) fn connections_of(&self, which: impl Fn(usize, usize) -> bool) -> Vec<u64> {
        let net = self.net.borrow();
        let ours = |one: &Connection| !one.loops && !one.forgotten && which(one.process, one.node);
        net.connections.iter().enumerate().filter(|(_, one)| ours(one)).map(|(number, _)| number as u64).collect()
    }

    /// A process has died. Its system closes its connections, unless that has died too.
    pub(crate) fn abandon(&self, process: usize, system_too: bool) {
        self.pause(process, Life::Dead);
        for connection in self.connections_of(|of, _| of == process) {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            one.closed = true;
            if system_too {
                one.out.held.clear();
            }
            drop(net);
            if !system_too {
                self.post(connection, true, Packet::End);
            }
        }
    }

    pub(crate) fn stop_node(&self, node: usize) {
        self.net.borrow_mut().servers[node].stopped = true;
    }

    pub(crate) fn continue_node(&self, node: usize) {
        self.net.borrow_mut().servers[node].stopped = false;
        for connection in self.connections_of(|_, of| of == node) {
            self.serve(connection);
        }
    }

    /// A server dies; its system too, if the clients are to hear nothing of it.
    pub(crate) fn kill_node(&self, node: usize, system_too: bool) {
        self.net.borrow_mut().servers[node].up = false;
        for connection in self.connections_of(|_, of| of == node) {
            let mut net = self.net.borrow_mut();
            net.connections[connection as usize].forgotten = true;
            net.servers[node].fake.hang_up(connection);
            drop(net);
            if !system_too {
                self.post(connection, false, Packet::End);
            }
        }
    }

    /// It comes back with what it had in its memory, on its disk, or nothing.
    pub(crate) fn start_node(&self, node: usize, memory: Memory) {
        let run = self.rng.borrow_mut().u64(..);
        let now = self.now.get();
        let mut net = self.net.borrow_mut();
        let server = &mut net.servers[node];
        let now_us = server.now_us(now);
        let keys = match memory {
            Memory::Kept => server.fake.keys.clone(),
            Memory::Disk => server.disk.clone(),
            Memory::Empty => Keys::default(),
        };
        if memory != Memory::Kept {
            server.amnesia.push(now);
        }
        server.fake.restart(run, now_us, keys);
        (server.up, server.stopped, server.began) = (true, false, now);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Kept,
    Disk,
    Empty,
}

fn asked(request: &[Bytes]) -> String {
    let words = request.iter().enumerate().filter(|(at, _)| *at != 1 || request.len() < 4);
    let words = words
        .map(|(_, word)| String::from_utf8_lossy(word))
        .map(|word| word[word.len().saturating_sub(40)..].to_owned());
    words.collect::<Vec<_>>().join(" ")
}

fn shown(reply: &[u8]) -> String {
    String::from_utf8_lossy(reply).replace("\r\n", " ").chars().take(140).collect()
}
