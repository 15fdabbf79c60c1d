//! A connection: from a frame of the client to the frame of its answers.
//!
//! Signatures, encryption, sessions and trees are checked here, so that a command only sees
//! requests of the account. Only NEGOTIATE, SESSION_SETUP and ECHO work without a login.

pub mod change;
pub mod copy;
pub mod create;
pub mod data;
pub mod directory;
pub mod info;
pub mod ioctl;
pub mod negotiate;
pub mod notify;
pub mod open;
pub mod session;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::negotiate::{MAX_DATA, Terms};
use self::notify::Notify;
use self::open::{File, Open};
use self::session::{MAX_WRONG, Session, Tree};
use crate::keys::{self, Preauth};
use crate::lobby::Place;
use crate::message::{
    HEADER, Head, PREVIOUS_FILE, PROTOCOL, RELATED, Reply, Request, SIGNED, SMB1, TRANSFORM,
    TRANSFORM_HEADER, command, put_header,
};
use crate::server::{Server, Share};
use crate::status::{Answer, Status};
use crate::window::Window;
use crate::wire::{Get, Put, index, size32};

/// The largest frame before a login, and after it: data, with room for heads.
const SMALL_FRAME: usize = 64 << 10;
const LARGE_FRAME: usize = MAX_DATA as usize + (64 << 10);
/// The maximum number of requests in a frame.
const MAX_COMPOUND: usize = 64;
/// Further requests of a frame fail after answers of this size in bytes, and after this time.
const MAX_ANSWERS: usize = 256 << 10;
const MAX_TIME: Duration = Duration::from_secs(5);

/// The connection must end: the peer does not speak SMB, or was found to be another one.
#[derive(Debug)]
pub struct End;

/// State that the requests of a frame have in common.
#[derive(Default)]
pub struct Context {
    pub session: u64,
    pub tree: u32,
    /// The file of the request before.
    pub file: Option<u64>,
    /// Whether it is the last request of the frame. Only that one may wait.
    pub last: bool,
    /// The status of the request before, for related ones.
    failed: Option<Status>,
    /// The request is signed or encrypted.
    pub authentic: bool,
    /// The signature of the request, whose field is zero now.
    signature: [u8; 16],
    /// The session that encrypted the frame.
    encrypted: Option<u64>,
}

pub struct Connection {
    pub(crate) server: Arc<Server>,
    pub(crate) place: Option<Place>,
    pub(crate) terms: Option<Terms>,
    /// Hash of NEGOTIATE and its answer.
    pub(crate) preauth: Preauth,
    pub(crate) sessions: HashMap<u64, Session>,
    pub(crate) opens: HashMap<u64, Open>,
    pub(crate) notify: Notify,
    pub(crate) last_tree: u32,
    /// Wrong passwords.
    pub(crate) wrong: u32,
    /// A session that ends after its answer.
    pub(crate) ended: Option<u64>,
    /// Late answers of sessions that have ended.
    pub(crate) farewells: Vec<Vec<u8>>,
    /// Message ids that the client may use.
    window: Window,
    /// The time of the frame that is handled.
    received: Instant,
    /// The time of the last request of the account, other than ECHO.
    used: Instant,
    /// The peer was found to be another one.
    pub(crate) broken: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close_where(|_| true);
        for id in self.sessions.keys() {
            self.server.forget(*id);
        }
    }
}

impl Connection {
    /// The stream of `place` is shut down if the client opens its session again elsewhere.
    pub fn new(server: &Arc<Server>, place: Option<Place>) -> Self {
        Self {
            server: server.clone(),
            place,
            terms: None,
            preauth: [0; 64],
            sessions: HashMap::new(),
            opens: HashMap::new(),
            notify: Notify::default(),
            last_tree: 0,
            wrong: 0,
            ended: None,
            farewells: Vec::new(),
            window: Window::default(),
            received: Instant::now(),
            used: Instant::now(),
            broken: false,
        }
    }

    pub(crate) fn logged_in(&self) -> bool {
        self.sessions.values().any(|it| it.keys.is_some())
    }

    /// Tells the place whether this connection, which is logged in, is in use.
    pub(crate) fn rest(&self) {
        if let Some(place) = &self.place {
            place.rest(self.used, !self.opens.is_empty());
        }
    }

    /// The largest frame that the client may send now.
    pub fn max_frame(&self) -> usize {
        if self.logged_in() { LARGE_FRAME } else { SMALL_FRAME }
    }

    /// Handles a frame. The answer is empty if there is none.
    pub fn receive(&mut self, frame: &mut [u8]) -> Result<Vec<u8>, End> {
        self.received = Instant::now();
        let answer = if frame.starts_with(TRANSFORM) {
            self.receive_encrypted(frame)?
        } else if frame.starts_with(SMB1) {
            let body = self.negotiate_smb1(frame).ok_or(End)?;
            if !self.window.take(0, 1) {
                return Err(End);
            }
            let request = [PROTOCOL, &[64, 0], &[0; 58]].concat();
            let request = Request::parse(&request).map_err(|_| End)?;
            let mut out = Vec::new();
            let status = Status::SUCCESS;
            let credits = self.window.grant(1);
            let head = Head { status, credits, session: 0, tree: 0, async_id: None };
            put_header(&mut out, &request, &head);
            out.put(&body);
            out
        } else {
            self.receive_plain(frame, Context::default())?
        };
        if let Some(session) = self.ended.take() {
            self.end_session(session);
        }
        if self.broken || self.wrong > MAX_WRONG { Err(End) } else { Ok(answer) }
    }

    fn receive_encrypted(&mut self, frame: &mut [u8]) -> Result<Vec<u8>, End> {
        let (head, data) = frame.split_at_mut_checked(TRANSFORM_HEADER).ok_or(End)?;
        let session = head.u64_at(44).map_err(|_| End)?;
        let keys = self.sessions.get(&session).and_then(|it| it.keys.as_ref()).ok_or(End)?;
        let length = head.u32_at(36).map_err(|_| End)?;
        let nonce = &head[20..20 + keys.nonce_length()];
        let right = index(length) == data.len() && head[42..44] == [1, 0];
        if !(right && keys.can_encrypt() && keys.open(nonce, &head[20..], &head[4..20], data)) {
            return Err(End);
        }
        let context = Context { encrypted: Some(session), authentic: true, ..Context::default() };
        let answer = self.receive_plain(data, context)?;
        Ok(self.encrypt(session, answer))
    }

    /// Encrypts an answer. One of a session that is gone is dropped.
    fn encrypt(&self, session: u64, mut answer: Vec<u8>) -> Vec<u8> {
        let Some(keys) = self.sessions.get(&session).and_then(|it| it.keys.as_ref()) else {
            return Vec::new();
        };
        if answer.is_empty() {
            return answer;
        }
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&self.server.next().to_le_bytes());
        let mut head = Vec::with_capacity(TRANSFORM_HEADER);
        head.put(TRANSFORM).put(&[0; 16]).put(&nonce).put32(size32(answer.len()));
        head.put16(0).put16(1).put64(session);
        let tag = keys.seal(&nonce[..keys.nonce_length()], &head[20..], &mut answer);
        head[4..20].copy_from_slice(&tag.unwrap_or_default());
        head.append(&mut answer);
        head
    }

    fn receive_plain(&mut self, frame: &mut [u8], mut context: Context) -> Result<Vec<u8>, End> {
        let (mut out, mut rest) = (Vec::new(), frame);
        for count in 0..MAX_COMPOUND {
            let next = index(rest.u32_at(20).map_err(|_| End)?);
            let length = if next == 0 { rest.len() } else { next };
            let (bytes, others) = rest.split_at_mut_checked(length).ok_or(End)?;
            context.signature = take_signature(bytes);
            let request = Request::parse(bytes).map_err(|_| End)?;
            // A CANCEL has the id of another request.
            if request.command != command::CANCEL && !self.window.take(request.id, request.charge) {
                return Err(End);
            }
            if count == 0 && request.flags & RELATED != 0 {
                // There is nothing that it could be related to ([MS-SMB2] 3.3.5.2.7.2).
                (context.session, context.tree) = (request.session, request.tree);
                context.failed = Some(Status::INVALID_PARAMETER);
            }
            context.last = next == 0;
            let start = out.len();
            self.answer(&mut context, &request, &mut out);
            if next == 0 || !next.is_multiple_of(8) {
                break;
            }
            rest = others;
            if out.len() > start {
                // The signature covers the padding, so it is made below.
                out.pad(8);
                let length = size32(out.len() - start);
                out.set32(start + 20, length);
            }
        }
        self.sign_all(&context, &mut out);
        Ok(out)
    }

    /// Signs answers that ask for it with their flag.
    fn sign_all(&self, context: &Context, out: &mut [u8]) {
        let mut rest = out;
        while rest.len() >= HEADER {
            let next = index(rest.u32_at(20).unwrap_or(0));
            let length = if next == 0 { rest.len() } else { next };
            let (message, others) = rest.split_at_mut(length);
            let session = message.u64_at(40).unwrap_or(0);
            let signed = message.u32_at(16).unwrap_or(0) & SIGNED != 0;
            let keys = self.sessions.get(&session).and_then(|it| it.keys.as_ref());
            if let (Some(keys), true, None) = (keys, signed, context.encrypted) {
                let signature = keys.sign(message, true);
                message[48..64].copy_from_slice(&signature);
            }
            rest = others;
        }
    }

    /// Appends the answer to a request.
    fn answer(&mut self, context: &mut Context, request: &Request<'_>, out: &mut Vec<u8>) {
        let related = request.flags & RELATED != 0;
        if !related {
            (context.session, context.tree) = (request.session, request.tree);
            (context.file, context.failed) = (None, None);
        }
        if context.failed.is_none()
            && let Some(id) = request.named_file()
        {
            context.file = Some(id);
        }
        let result = match context.failed {
            Some(status) => Err(status),
            None if out.len() > MAX_ANSWERS => Err(Status::INSUFFICIENT_RESOURCES),
            None if self.received.elapsed() > MAX_TIME => Err(Status::IO_TIMEOUT),
            None => self.check(context, request).and_then(|()| self.execute(context, request)),
        };
        if context.authentic && request.command != command::ECHO {
            self.used = self.received;
        }
        if request.command == command::CANCEL {
            return;
        }
        let reply = result.unwrap_or_else(Reply::error);
        let failed = reply.status.0 >> 30 == 3 && reply.status != Status::MORE_PROCESSING_REQUIRED;
        // Without a file, related requests fail like the first one ([MS-SMB2] 3.3.5.2.7.2).
        context.failed = (failed && context.file.is_none()).then_some(reply.status);
        let start = out.len();
        let async_id = (reply.status == Status::PENDING).then(|| self.notify.last());
        let head = Head {
            status: reply.status,
            credits: self.window.grant(request.credits),
            session: context.session,
            tree: context.tree,
            async_id,
        };
        put_header(out, request, &head);
        out.put(&reply.body);
        match (request.command, reply.status) {
            (command::NEGOTIATE, _) => {
                keys::extend(&mut self.preauth, request.bytes);
                keys::extend(&mut self.preauth, &out[start..]);
            }
            (command::SESSION_SETUP, Status::MORE_PROCESSING_REQUIRED) => {
                if let Some(session) = self.sessions.get_mut(&context.session) {
                    keys::extend(&mut session.preauth, &out[start..]);
                }
            }
            // Interim answers are not signed ([MS-SMB2] 3.3.4.1.1).
            (_, Status::PENDING) => (),
            (command::SESSION_SETUP, Status::SUCCESS) => flag_signed(out, start),
            _ if request.flags & SIGNED != 0 => flag_signed(out, start),
            _ => (),
        }
    }

    /// Checks that a request comes from the account.
    fn check(&self, context: &mut Context, request: &Request<'_>) -> Answer<()> {
        let session = self.sessions.get(&context.session);
        let keys = session.and_then(|it| it.keys.as_ref());
        if let Some(session) = context.encrypted {
            if session != context.session {
                return Err(Status::ACCESS_DENIED);
            }
        } else {
            context.authentic = match keys {
                Some(keys) if request.flags & SIGNED != 0 => {
                    keys.verify(request.bytes, &context.signature)
                }
                _ => false,
            };
        }
        match request.command {
            command::NEGOTIATE => Ok(()),
            _ if self.terms.is_none() => Err(Status::INVALID_PARAMETER),
            command::SESSION_SETUP => Ok(()),
            command::ECHO if context.session == 0 => Ok(()),
            _ if keys.is_none() => Err(Status::USER_SESSION_DELETED),
            _ if !context.authentic => Err(Status::ACCESS_DENIED),
            command::LOGOFF | command::TREE_CONNECT | command::ECHO | command::CANCEL => Ok(()),
            _ if session.is_some_and(|it| it.trees.contains_key(&context.tree)) => Ok(()),
            _ => Err(Status::NETWORK_NAME_DELETED),
        }
    }

    fn execute(&mut self, context: &mut Context, request: &Request<'_>) -> Answer<Reply> {
        match request.command {
            command::NEGOTIATE => self.negotiate(request),
            command::SESSION_SETUP => self.session_setup(context, request),
            command::LOGOFF => self.logoff(context, request),
            command::TREE_CONNECT => self.tree_connect(context, request),
            command::TREE_DISCONNECT => self.tree_disconnect(context, request),
            command::CREATE => self.create(context, request),
            command::CLOSE => self.close(context, request),
            command::FLUSH => self.flush(context, request),
            command::READ => self.read(context, request),
            command::WRITE => self.write(context, request),
            command::LOCK => self.lock(context, request),
            command::IOCTL => self.ioctl(context, request),
            command::CANCEL => {
                self.cancel(context.session, request);
                Err(Status::CANCELLED)
            }
            command::ECHO => request.expect(4).map(|()| Reply::plain()),
            command::QUERY_DIRECTORY => self.query_directory(context, request),
            command::CHANGE_NOTIFY => self.change_notify(context, request),
            command::QUERY_INFO => self.query_info(context, request),
            command::SET_INFO => self.set_info(context, request),
            // There are no oplocks that a client could acknowledge.
            _ => Err(Status::INVALID_PARAMETER),
        }
    }

    pub(crate) fn tree(&self, context: &Context) -> Answer<Tree> {
        let session = self.sessions.get(&context.session);
        let tree = session.and_then(|it| it.trees.get(&context.tree));
        tree.copied().ok_or(Status::NETWORK_NAME_DELETED)
    }

    pub(crate) fn share(&self, share: usize) -> &Share {
        &self.server.config.shares[share]
    }

    /// The open file that a request names at `at` in its body.
    pub(crate) fn open(
        &mut self,
        context: &Context,
        request: &Request<'_>,
        at: usize,
    ) -> Answer<&mut Open> {
        let id = context.file_id(request, at)?;
        let right = |it: &&mut Open| (it.session, it.tree) == (context.session, context.tree);
        self.opens.get_mut(&id).filter(right).ok_or(Status::FILE_CLOSED)
    }

    /// As [`Connection::open`], for a file or directory of a share.
    pub(crate) fn file(
        &mut self,
        context: &Context,
        request: &Request<'_>,
        at: usize,
    ) -> Answer<&mut File> {
        self.open(context, request, at)?.file().ok_or(Status::INVALID_DEVICE_REQUEST)
    }

    /// The answers that became ready meanwhile, as frames.
    pub fn take_ready(&mut self) -> Vec<Vec<u8>> {
        let ready = self.notify.take_ready(&self.server.table);
        let late: Vec<_> = ready.into_iter().filter_map(|it| self.late_answer(&it)).collect();
        let mut frames = std::mem::take(&mut self.farewells);
        frames.extend(late);
        frames
    }

    fn late_answer(&self, late: &notify::Late) -> Option<Vec<u8>> {
        let keys = self.sessions.get(&late.session)?.keys.as_ref()?;
        let request = Request::parse(&late.header).ok()?;
        let mut out = Vec::new();
        let head = Head {
            status: late.reply.status,
            credits: 0,
            session: late.session,
            tree: request.tree,
            async_id: Some(late.id),
        };
        put_header(&mut out, &request, &head);
        out.put(&late.reply.body);
        if late.encrypted {
            return Some(self.encrypt(late.session, out));
        }
        flag_signed(&mut out, 0);
        let signature = keys.sign(&out, true);
        out[48..64].copy_from_slice(&signature);
        Some(out)
    }
}

impl Context {
    /// The id of the file that a request names at `at` in its body.
    fn file_id(&self, request: &Request<'_>, at: usize) -> Answer<u64> {
        match request.file(at)? {
            PREVIOUS_FILE => self.file.ok_or(Status::FILE_CLOSED),
            id => Ok(id),
        }
    }

    pub fn is_encrypted(&self) -> bool {
        self.encrypted.is_some()
    }
}

/// Takes the signature out of a signed request, which is verified with zeros in its place.
fn take_signature(request: &mut [u8]) -> [u8; 16] {
    let mut signature = [0; 16];
    if request.len() >= HEADER && request[16] & 8 != 0 {
        signature.copy_from_slice(&request[48..64]);
        request[48..64].fill(0);
    }
    signature
}

fn flag_signed(out: &mut [u8], start: usize) {
    out[start + 16] |= 8;
}
