//! Questions to download pages: the shape that all ways to a link share.
//!
//! A way is a state machine without a network: it gets the last reply and returns the next request,
//! so that each reply of a server can be tested as it is described.

use hyper::header::REFERER;

use super::client::Client;
use super::digest::Checksum;
use super::fault::Fault;

/// Replies are pages, scripts and lists. Longer ones are refused.
const MAX_REPLY: usize = 2 << 20;
/// A way asks fewer questions than this: Microsoft's evaluation centre has a link for each language
/// and medium.
const MAX_QUESTIONS: usize = 64;
/// Catalogs are longer than pages.
pub const MAX_CATALOG: usize = 32 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    pub url: String,
    pub referer: Option<String>,
    pub limit: usize,
    /// Whether a redirection is followed, or is the reply.
    pub follows: bool,
}

impl Question {
    pub fn new(url: String) -> Self {
        Self { url, referer: None, limit: MAX_REPLY, follows: true }
    }

    /// Where does this link lead?
    pub fn redirection(url: String) -> Self {
        Self { follows: false, ..Self::new(url) }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    pub status: u16,
    pub body: Vec<u8>,
    /// Where the first redirection leads, if it was not followed.
    pub location: Option<String>,
}

impl Reply {
    pub fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }

    /// The body of a good reply. Refusals of servers and proxies become sentences.
    pub fn good(&self, whom: &str) -> Result<&[u8], Fault> {
        match self.status {
            200..=299 => Ok(&self.body),
            403 | 429 => {
                Err(Fault::last(format!("{whom} refused the request (status {})", self.status)))
            }
            404 | 410 => Err(Fault::last(format!("{whom} has moved (status {})", self.status))),
            status @ 500.. => Err(Fault::passing(format!("{whom}: status {status}"))),
            status => Err(Fault::last(format!("{whom}: unexpected status {status}"))),
        }
    }
}

/// A file to download, as a way has found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub url: String,
    pub referer: Option<String>,
    pub length: Option<u64>,
    pub checksum: Option<Checksum>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Ask(Question),
    Found(Link),
}

pub trait Way {
    fn first(&self) -> Question;
    fn next(&mut self, reply: &Reply) -> Result<Step, Fault>;
}

/// Goes a way to its link.
pub async fn go(client: &Client, way: &mut dyn Way) -> Result<Link, Fault> {
    let mut question = way.first();
    for _ in 0..MAX_QUESTIONS {
        let headers: Vec<_> = question.referer.iter().map(|it| (REFERER, it.clone())).collect();
        let reply = if question.follows {
            let answer = client.get(&question.url, &headers).await?;
            let host = answer.address.host_header();
            let status = answer.head.status.as_u16();
            let (body, more) = answer.start(question.limit).await?;
            if more {
                return Err(Fault::last(format!("{host} sends too much")));
            }
            Reply { status, body, location: None }
        } else {
            let (status, location) = client.redirection(&question.url, &headers).await?;
            Reply { status, location, ..Reply::default() }
        };
        match way.next(&reply)? {
            Step::Ask(next) => question = next,
            Step::Found(link) => return Ok(link),
        }
    }
    Err(Fault::last("the download page leads in circles"))
}

/// Whether a link leads to a server of Microsoft's, with TLS.
pub(super) fn is_microsofts(url: &str) -> bool {
    super::address::Address::read(url)
        .is_ok_and(|it| it.secure && it.login().is_none() && it.host.ends_with(".microsoft.com"))
}

/// Whether a body is a web page where something else was expected.
pub(super) fn is_page(body: &[u8]) -> bool {
    body.trim_ascii_start().starts_with(b"<")
}
