//! A web client for few and large downloads (HTTP/1.1, RFC 9110, RFC 9112).
//!
//! It is hyper's client, because hyper is the web server of this program already: one parser of
//! HTTP to keep up to date. Redirections, proxies and timeouts are here and in `connect`.
//!
//! Threats: servers, proxies and everybody on the way answer as they like. Bodies and redirections
//! are counted, silence is limited, and no byte is believed because of its sender.

use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{
    ACCEPT_ENCODING, AUTHORIZATION, HOST, HeaderName, LOCATION, PROXY_AUTHORIZATION, USER_AGENT,
};
use hyper::http::response::Parts;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;

use super::address::Address;
use super::connect::{Connection, Connector};
use super::fault::Fault;
use super::reach::Reach;
use crate::settings::Web;

const MAX_REDIRECTIONS: usize = 10;
/// The time for a short answer, in times of [`Patience::stall`].
const SHORT_ANSWER: u32 = 5;
/// The download pages answer browsers only.
const BROWSER: &str = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0";

/// How long the client waits.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For a connection, its TLS included, and for the head of an answer.
    pub answer: Duration,
    /// For the next byte.
    pub stall: Duration,
    /// After the first failure in a row. Each further wait is twice as long.
    pub pause: Duration,
    /// Failures in a row before the client gives up.
    pub failures: u32,
}

impl Default for Patience {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { answer: seconds(30), stall: seconds(60), pause: seconds(1), failures: 8 }
    }
}

impl Patience {
    /// How long to wait after this number of failures in a row.
    pub fn pause(&self, failures: u32) -> Duration {
        (self.pause * 2_u32.pow(failures.saturating_sub(1).min(5))).min(self.stall)
    }
}

pub struct Client {
    connector: Connector,
    pub patience: Patience,
}

/// An answer, after redirections.
pub struct Answer {
    pub address: Address,
    pub head: Parts,
    body: Incoming,
    stall: Duration,
}

impl Client {
    pub fn new(web: &Web, patience: Patience) -> anyhow::Result<Self> {
        Ok(Self { connector: Connector::new(web)?, patience })
    }

    /// Requests an address. Errors of the server are answers, too.
    pub async fn get(&self, url: &str, headers: &[(HeaderName, String)]) -> Result<Answer, Fault> {
        let mut address = Address::read(url)?;
        let login = address.login();
        let first = address.clone();
        let mut limit = Reach::Host;
        for _ in 0..=MAX_REDIRECTIONS {
            // Other servers do not get the login.
            let login = login.as_deref().filter(|_| address.belongs_to(&first));
            let connection = self.connect(&address, limit).await?;
            // The user gives the first address, and servers the others.
            limit = limit.min(connection.reach);
            let answer = self.once(connection, &address, headers, login).await?;
            match location(&answer) {
                Some(location) => address = address.redirected(location)?,
                None => {
                    let (head, body) = answer.into_parts();
                    return Ok(Answer { address, head, body, stall: self.patience.stall });
                }
            }
        }
        Err(Fault::last(format!("{} redirects in circles", first.host)))
    }

    /// The status of an address, and where it leads, without going there.
    pub async fn redirection(
        &self,
        url: &str,
        headers: &[(HeaderName, String)],
    ) -> Result<(u16, Option<String>), Fault> {
        let address = Address::read(url)?;
        let connection = self.connect(&address, Reach::Host).await?;
        let answer = self.once(connection, &address, headers, None).await?;
        Ok((answer.status().as_u16(), location(&answer).map(str::to_owned)))
    }

    async fn connect(&self, address: &Address, limit: Reach) -> Result<Connection, Fault> {
        let connecting = self.connector.connect(address, limit);
        timeout(self.patience.answer, connecting).await.map_err(|_| self.late(address))?
    }

    fn late(&self, address: &Address) -> Fault {
        let (host, seconds) = (address.host_header(), self.patience.answer.as_secs());
        Fault::passing(format!("{host} does not answer within {seconds} s"))
    }

    async fn once(
        &self,
        connection: Connection,
        address: &Address,
        headers: &[(HeaderName, String)],
        login: Option<&str>,
    ) -> Result<Response<Incoming>, Fault> {
        let broken = |error| {
            let host = address.host_header();
            Fault::passing(format!("{host}: the connection broke: {error}"))
        };
        let (mut sender, driver) =
            http1::handshake(TokioIo::new(connection.stream)).await.map_err(broken)?;
        // It ends when the answer is dropped.
        tokio::spawn(driver);
        let target = match connection.by_proxy {
            Some(_) => format!("http://{}{}", address.host_header(), address.path()),
            None => address.path().to_owned(),
        };
        let mut request = Request::builder()
            .method(Method::GET)
            .uri(target)
            .header(HOST, address.host_header())
            .header(USER_AGENT, BROWSER)
            .header(ACCEPT_ENCODING, "identity");
        if let Some(login) = login {
            request =
                request.header(AUTHORIZATION, format!("Basic {}", BASE64_STANDARD.encode(login)));
        }
        if let Some(login) = connection.by_proxy.flatten() {
            request = request.header(PROXY_AUTHORIZATION, login);
        }
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.body(Empty::<Bytes>::new());
        let request =
            request.map_err(|error| Fault::last(format!("{}: {error}", address.shown())))?;
        let answer = timeout(self.patience.answer, sender.send_request(request)).await;
        answer.map_err(|_| self.late(address))?.map_err(broken)
    }
}

/// Where a redirection leads.
fn location(answer: &Response<Incoming>) -> Option<&str> {
    let location = answer.headers().get(LOCATION).filter(|_| answer.status().is_redirection());
    location?.to_str().ok()
}

impl Answer {
    pub fn header(&self, name: &HeaderName) -> Option<&str> {
        self.head.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The next bytes of the body; `None` at its end. A body that ends early is an error.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Fault> {
        let host = self.address.host_header();
        loop {
            let frame = timeout(self.stall, self.body.frame()).await.map_err(|_| {
                Fault::passing(format!("{host} has sent nothing for {} s", self.stall.as_secs()))
            })?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => {
                    return Err(Fault::passing(format!("{host}: the connection broke: {error}")));
                }
                // Trailers are no data.
                Some(Ok(frame)) => {
                    if let Some(bytes) = frame.into_data().ok().filter(|it| !it.is_empty()) {
                        return Ok(Some(bytes));
                    }
                }
            }
        }
    }

    /// At most `limit` bytes of the body, and whether there are more. A server that sends them one
    /// by one is given up, too.
    pub async fn start(self, limit: usize) -> Result<(Vec<u8>, bool), Fault> {
        let (host, wait) = (self.address.host_header(), self.stall * SHORT_ANSWER);
        let late = |_| {
            let seconds = wait.as_secs();
            Fault::passing(format!("{host} does not end its answer within {seconds} s"))
        };
        timeout(wait, self.gather(limit)).await.map_err(late)?
    }

    async fn gather(mut self, limit: usize) -> Result<(Vec<u8>, bool), Fault> {
        let mut whole = Vec::new();
        while let Some(bytes) = self.next().await? {
            let room = limit - whole.len();
            whole.extend_from_slice(&bytes[..bytes.len().min(room)]);
            if bytes.len() > room {
                return Ok((whole, true));
            }
        }
        Ok((whole, false))
    }
}
