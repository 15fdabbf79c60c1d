//! Sessions and trees: SESSION_SETUP, LOGOFF, TREE_CONNECT, TREE_DISCONNECT.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::connection::{Connection, Context};
use crate::keys::{self, Keys, Preauth};
use crate::lobby::Place;
use crate::message::{Reply, Request};
use crate::ntlm::{Challenge, Login};
use crate::server::{now, random};
use crate::spnego::{self, Token};
use crate::status::{Answer, Status};
use crate::wire::{Put, size16, text};

/// The maximum number of sessions of a connection, and of trees of a session.
const MAX_SESSIONS: usize = 8;
const MAX_TREES: usize = 32;
/// A wrong password costs this time, and a connection ends after some of them.
const WRONG: Duration = Duration::from_secs(1);
pub const MAX_WRONG: u32 = 4;
/// SESSION_SETUP of a further connection.
const BINDING: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tree {
    /// `IPC$`, which has pipes.
    Pipes,
    /// A share, by its number.
    Files(usize),
}

pub struct Session {
    /// Set after the login.
    pub keys: Option<Keys>,
    /// Hash of the messages so far, on which the keys depend.
    pub preauth: Preauth,
    pub trees: HashMap<u32, Tree>,
    challenge: Option<Challenge>,
    mechanisms: Vec<u8>,
    bare: bool,
}

impl Session {
    fn new(preauth: Preauth) -> Self {
        Self {
            keys: None,
            preauth,
            trees: HashMap::new(),
            challenge: None,
            mechanisms: Vec::new(),
            bare: false,
        }
    }
}

impl Connection {
    pub(crate) fn session_setup(
        &mut self,
        context: &mut Context,
        request: &Request<'_>,
    ) -> Answer<Reply> {
        request.expect(25)?;
        if request.u8(2)? & BINDING != 0 {
            return Err(Status::REQUEST_NOT_ACCEPTED);
        }
        let buffer = request.buffer(request.u16(12)?.into(), request.u16(14)?.into())?;
        let token = spnego::parse(buffer)?;
        let previous = request.u64(16)?;
        if context.session == 0 {
            if self.sessions.len() >= MAX_SESSIONS {
                return Err(Status::REQUEST_NOT_ACCEPTED);
            }
            context.session = self.server.next();
            self.sessions.insert(context.session, Session::new(self.preauth));
        }
        let id = context.session;
        let session = self.sessions.get_mut(&id).ok_or(Status::USER_SESSION_DELETED)?;
        if session.keys.is_some() && !context.authentic {
            return Err(Status::ACCESS_DENIED);
        }
        keys::extend(&mut session.preauth, request.bytes);
        if let Some(mechanisms) = token.mechanisms {
            session.mechanisms = mechanisms.to_vec();
        }
        let answer = match token.ntlm {
            None => Ok((Status::MORE_PROCESSING_REQUIRED, spnego::choose_ntlm())),
            Some(ntlm) if ntlm.get(8) == Some(&1) => self.challenge(id, &token),
            Some(_) => self.login(id, &token),
        };
        match answer {
            Ok((status, token)) => {
                if status == Status::SUCCESS && previous != id {
                    self.replace(previous);
                }
                let mut body = Vec::new();
                body.put16(9).put16(0).put16(72).put16(size16(token.len())).put(&token);
                Ok(Reply::with(status, body))
            }
            Err(status) => {
                self.end_session(id);
                Err(status)
            }
        }
    }

    /// Ends a session that its client has lost, here or on another connection.
    fn replace(&mut self, previous: u64) {
        if self.sessions.contains_key(&previous) {
            self.end_session(previous);
        } else {
            self.server.replace(previous);
        }
    }

    fn challenge(&mut self, id: u64, token: &Token<'_>) -> Answer<(Status, Vec<u8>)> {
        let host = &self.server.config.host;
        let session = self.sessions.get_mut(&id).ok_or(Status::USER_SESSION_DELETED)?;
        let ntlm = token.ntlm.ok_or(Status::INVALID_PARAMETER)?;
        let challenge = Challenge::new(ntlm, random(), now(), host)?;
        let bare = challenge.message.clone();
        session.challenge = Some(challenge);
        session.bare = token.bare;
        let answer = if token.bare { bare } else { spnego::challenge(&bare) };
        Ok((Status::MORE_PROCESSING_REQUIRED, answer))
    }

    fn login(&mut self, id: u64, token: &Token<'_>) -> Answer<(Status, Vec<u8>)> {
        let server = self.server.clone();
        let terms = self.terms.as_ref().ok_or(Status::INVALID_PARAMETER)?;
        let session = self.sessions.get_mut(&id).ok_or(Status::USER_SESSION_DELETED)?;
        let challenge = session.challenge.take().ok_or(Status::INVALID_PARAMETER)?;
        let ntlm = token.ntlm.ok_or(Status::INVALID_PARAMETER)?;
        let login = challenge.check(&server.config.account, ntlm).and_then(|login| {
            let right = token.mic.is_none_or(|mic| is_right(&login, &session.mechanisms, mic));
            if right { Ok(login) } else { Err(Status::LOGON_FAILURE) }
        });
        let login = match login {
            Ok(login) => login,
            Err(status) => {
                self.wrong += 1;
                if self.wrong <= 1 {
                    tracing::warn!("shared folder: a login was refused");
                }
                self.delay_wrong()?;
                return Err(status);
            }
        };
        // A session that logs in again keeps its keys.
        if session.keys.is_none() {
            if let Some(place) = &self.place {
                place.enter(Instant::now())?;
            }
            session.keys = Some(Keys::new(&login.session_key, &terms.scheme(&session.preauth)));
            server.register(id, self.place.as_ref());
        }
        let mic = token.mic.map(|_| login.signature(true, &session.mechanisms));
        let answer = if session.bare { Vec::new() } else { spnego::completed(mic) };
        Ok((Status::SUCCESS, answer))
    }

    /// Delays the answer to a wrong password.
    fn delay_wrong(&self) -> Answer<()> {
        let stranger = self.place.as_ref().filter(|_| !self.logged_in());
        stranger.map_or(Ok(()), Place::keep)?;
        let one_by_one = self.server.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::sleep(WRONG);
        drop(one_by_one);
        if let Some(place) = stranger {
            place.wait();
        }
        Ok(())
    }

    pub(crate) fn end_session(&mut self, id: u64) {
        self.close_where(|open| open.session == id);
        // Its requests that wait end with it, and their answers need its keys.
        self.farewells = self.take_ready();
        self.sessions.remove(&id);
        self.server.forget(id);
    }

    pub(crate) fn logoff(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        request.expect(4)?;
        self.ended = Some(context.session);
        Ok(Reply::plain())
    }

    pub(crate) fn tree_connect(
        &mut self,
        context: &mut Context,
        request: &Request<'_>,
    ) -> Answer<Reply> {
        request.expect(9)?;
        let path = text(request.buffer(request.u16(4)?.into(), request.u16(6)?.into())?)?;
        let name = path.rsplit('\\').next().unwrap_or_default();
        let shares = &self.server.config.shares;
        let tree = if name.eq_ignore_ascii_case("IPC$") {
            Tree::Pipes
        } else {
            let found = shares.iter().position(|it| it.name.eq_ignore_ascii_case(name));
            Tree::Files(found.ok_or(Status::BAD_NETWORK_NAME)?)
        };
        let session =
            self.sessions.get_mut(&context.session).ok_or(Status::USER_SESSION_DELETED)?;
        if session.trees.len() >= MAX_TREES {
            return Err(Status::INSUFFICIENT_RESOURCES);
        }
        self.last_tree = self.last_tree.wrapping_add(1).max(1);
        context.tree = self.last_tree;
        session.trees.insert(self.last_tree, tree);
        let (kind, rights) = match tree {
            Tree::Pipes => (2, 0x001f_01ff),
            Tree::Files(share) if shares[share].read_only => {
                (1, crate::connection::open::READ_ONLY_ACCESS)
            }
            Tree::Files(_) => (1, 0x001f_01ff),
        };
        let mut body = Vec::new();
        // No offline copies: share flag NO_CACHING.
        body.put16(16).put(&[kind, 0]).put32(0x30).put32(0).put32(rights);
        Ok(Reply::new(body))
    }

    pub(crate) fn tree_disconnect(
        &mut self,
        context: &Context,
        request: &Request<'_>,
    ) -> Answer<Reply> {
        request.expect(4)?;
        self.close_where(|open| (open.session, open.tree) == (context.session, context.tree));
        if let Some(session) = self.sessions.get_mut(&context.session) {
            session.trees.remove(&context.tree);
        }
        Ok(Reply::plain())
    }
}

fn is_right(login: &Login, mechanisms: &[u8], mic: &[u8]) -> bool {
    use subtle::ConstantTimeEq;
    login.signature(false, mechanisms).ct_eq(mic).into()
}
