//! Microsoft's page for Windows 11 and 10, in the steps of the page itself: page, session, the
//! script that looks for robots and its reply, the list of languages, the links.
//!
//! Threats: all of it comes from the network. Only numbers and short names are taken over, links
//! lead to Microsoft alone, and refusals end with what the user can do.

use host::uuid::Uuid;
use serde::Deserialize;

use super::ask::{Link, Question, Reply, Step, Way, is_microsofts, is_page};
use super::digest::Checksum;
use super::fault::Fault;

const ORGANIZATION: &str = "y6jn8c31";
const INSTANCE: &str = "560dc9f3-1aa5-4a2f-b63c-9e18f8d0e175";
const PROFILE: &str = "606624d44113";
const API: &str = "https://www.microsoft.com/software-download-connector/api";
const WHOM: &str = "Microsoft's download page";
/// The type of links to images for 64-bit PCs.
const X64: u32 = 1;
/// The type of the error for addresses that have downloaded too much.
const BANNED: u32 = 9;
const MAX_TOKEN: usize = 64;
const MAX_NUMBER: usize = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Page,
    Session,
    Script,
    Robot,
    Languages,
    Links,
}

/// The way to the link of one language.
pub struct Consumer {
    page: &'static str,
    /// The number of the product, and after the page the one there.
    edition: u32,
    /// Microsoft's name of the language.
    language: &'static str,
    session: Uuid,
    /// Milliseconds since 1970.
    now: u64,
    checksum: Option<Checksum>,
    last: Last,
}

impl Consumer {
    pub fn new(
        page: &'static str,
        edition: u32,
        language: &'static str,
        session: Uuid,
        now: u64,
    ) -> Self {
        Self { page, edition, language, session, now, checksum: None, last: Last::Page }
    }

    fn ask(&mut self, last: Last, url: String) -> Step {
        self.last = last;
        let referer = Some(self.page.to_owned());
        Step::Ask(Question { referer, ..Question::new(url) })
    }

    /// Reads product and checksum from the page. Without them the way goes on.
    fn read_page(&mut self, text: &str) {
        let number = text.split("<option value=\"").skip(1).find_map(|rest| {
            let (number, rest) = rest.split_once('"')?;
            rest.starts_with(">Windows").then(|| number.parse().ok()).flatten()
        });
        self.edition = number.unwrap_or(self.edition);
        self.checksum = checksum(text, self.language);
    }

    fn languages(&self, body: &[u8]) -> Result<String, Fault> {
        let list: Languages = list(body)?;
        refusal(list.errors)?;
        let fits = |sku: &&Sku| sku.language == self.language;
        let id = list.skus.iter().find(fits).map(|sku| sku.id.text());
        let plain = |id: &String| {
            !id.is_empty() && id.len() <= MAX_NUMBER && id.bytes().all(|it| it.is_ascii_digit())
        };
        id.filter(plain).ok_or_else(|| Fault::last(format!("{WHOM} has no {}", self.language)))
    }

    fn link(&self, body: &[u8]) -> Result<Link, Fault> {
        let list: Links = list(body)?;
        refusal(list.errors)?;
        let mut links = list.options.into_iter().filter(|link| link.kind == X64);
        let link = links.next().ok_or_else(|| Fault::last(format!("{WHOM} gave no link")))?;
        if !is_microsofts(&link.url) {
            return Err(Fault::last(format!("{WHOM} gave a link to another server")));
        }
        let referer = Some(self.page.to_owned());
        Ok(Link { url: link.url, referer, length: None, checksum: self.checksum.clone() })
    }
}

impl Way for Consumer {
    fn first(&self) -> Question {
        Question::new(self.page.to_owned())
    }

    fn next(&mut self, reply: &Reply) -> Result<Step, Fault> {
        let session = self.session;
        match self.last {
            Last::Page => {
                if (200..300).contains(&reply.status) {
                    self.read_page(&reply.text());
                }
                let host = "https://vlscppe.microsoft.com";
                let query = format!("org_id={ORGANIZATION}&session_id={session}");
                Ok(self.ask(Last::Session, format!("{host}/tags?{query}")))
            }
            Last::Session => {
                reply.good(WHOM)?;
                let host = "https://ov-df.microsoft.com";
                let query = format!("instanceId={INSTANCE}&PageId=si&session_id={session}");
                Ok(self.ask(Last::Script, format!("{host}/mdt.js?{query}")))
            }
            Last::Script => {
                reply.good(WHOM)?;
                let script = reply.text();
                let (token, ticks) = tokens(&script)?;
                let host = "https://ov-df.microsoft.com";
                let who = format!("session_id={session}&CustomerId={INSTANCE}&PageId=si");
                let what = format!("w={token}&mdt={}&rticks={ticks}", self.now);
                Ok(self.ask(Last::Robot, format!("{host}/?{who}&{what}")))
            }
            Last::Robot => {
                reply.good(WHOM)?;
                let edition = self.edition;
                let query = format!("profile={PROFILE}&ProductEditionId={edition}&SKU=undefined");
                let rest = format!("friendlyFileName=undefined&Locale=en-US&sessionID={session}");
                let action = "getskuinformationbyproductedition";
                Ok(self.ask(Last::Languages, format!("{API}/{action}?{query}&{rest}")))
            }
            Last::Languages => {
                let sku = self.languages(reply.good(WHOM)?)?;
                let query = format!("profile={PROFILE}&productEditionId=undefined&SKU={sku}");
                let rest = format!("friendlyFileName=undefined&Locale=en-US&sessionID={session}");
                let action = "GetProductDownloadLinksBySku";
                Ok(self.ask(Last::Links, format!("{API}/{action}?{query}&{rest}")))
            }
            Last::Links => Ok(Step::Found(self.link(reply.good(WHOM)?)?)),
        }
    }
}

/// The checksum in the row of a language: `<td>German 64-bit</td><td>193B…</td>`.
fn checksum(page: &str, language: &str) -> Option<Checksum> {
    let (_, rest) = page.split_once(&format!(">{language} 64-bit</td>"))?;
    let (_, rest) = rest.split_once("<td")?;
    let (_, rest) = rest.split_once('>')?;
    Checksum::sha256(rest.split('<').next()?.trim()).ok()
}

/// The values `w` and `rticks` in the script.
fn tokens(script: &str) -> Result<(&str, &str), Fault> {
    let run = |mark: &str, most: usize, fits: fn(u8) -> bool| {
        let (_, rest) = script.split_once(mark)?;
        let rest = rest.trim_start_matches(['"', '+', ' ']);
        let length = rest.bytes().take_while(|byte| fits(*byte)).count();
        (1..=most).contains(&length).then(|| &rest[..length])
    };
    let token = run("&w=", MAX_TOKEN, |byte| byte.is_ascii_hexdigit())
        .or_else(|| run("?w=", MAX_TOKEN, |byte| byte.is_ascii_hexdigit()));
    let ticks = run("rticks=", MAX_NUMBER, |byte| byte.is_ascii_digit());
    token.zip(ticks).ok_or_else(|| {
        Fault::last(format!("{WHOM} has changed: its script is not the expected one"))
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Languages {
    #[serde(default)]
    skus: Vec<Sku>,
    #[serde(default)]
    errors: Option<Vec<Refusal>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Sku {
    id: Number,
    #[serde(default)]
    language: String,
}

/// Numbers come as texts, too.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Text(String),
    Number(u64),
}

impl Number {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(number) => number.to_string(),
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Links {
    #[serde(default, rename = "ProductDownloadOptions")]
    options: Vec<Option64>,
    #[serde(default)]
    errors: Option<Vec<Refusal>>,
}

#[derive(Deserialize)]
struct Option64 {
    #[serde(rename = "Uri", default)]
    url: String,
    #[serde(rename = "DownloadType", default)]
    kind: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Refusal {
    #[serde(default)]
    value: String,
    #[serde(rename = "Type", default)]
    kind: u32,
}

/// Words with which Microsoft refuses an address.
const REFUSED: [&str; 3] = [
    "Sentinel marked this request as rejected",
    "We are unable to complete your request at this time",
    "Your request has been blocked",
];

fn banned() -> Fault {
    Fault::last(
        "Microsoft refuses downloads to this address of the Internet for now (its page says \
         “Sentinel marked this request as rejected”), which lasts about a day",
    )
}

fn refusal(errors: Option<Vec<Refusal>>) -> Result<(), Fault> {
    let Some(error) = errors.and_then(|errors| errors.into_iter().next()) else { return Ok(()) };
    if error.kind == BANNED || REFUSED.iter().any(|words| error.value.contains(words)) {
        return Err(banned());
    }
    let said = crate::settings::value::quote(&error.value);
    Err(Fault::last(format!("{WHOM} refuses: {said}")))
}

fn list<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Fault> {
    let text = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    if let Ok(read) = serde_json::from_slice(text) {
        return Ok(read);
    }
    let said = String::from_utf8_lossy(text);
    if REFUSED.iter().any(|words| said.contains(words)) {
        return Err(banned());
    }
    let what = match (text.trim_ascii().is_empty(), is_page(text)) {
        (true, _) => "an empty reply",
        (_, true) => "a web page, as captive portals, proxies and checks for robots do",
        _ => "something unexpected",
    };
    Err(Fault::last(format!("{WHOM} sent {what} instead of its list")))
}

#[cfg(test)]
mod test {
    use super::*;

    const PAGE: &str = "https://www.microsoft.com/en-us/software-download/windows11";
    const HASH: &str = "193bbde65ec84e298a1c798959489c8375ed501cf973c6d37fa52bb22ee8d43b";
    const SCRIPT: &str = "window.dfp={url:\"https://ov-df.microsoft.com/?session_id=1&CustomerId=2\
        &PageId=si&w=8DF26E07265FC0D\"};src+=\"&mdt=\"+start;src+=\"&rticks=\"+1791644954371;";
    const SKUS: &str = "{\"Skus\":[{\"Id\":\"19001\",\"Language\":\"English\"},\
        {\"Id\":19002,\"Language\":\"German\",\"LocalizedLanguage\":\"Deutsch\"}]}";
    const LINKS: &str = "{\"ProductDownloadOptions\":[{\"Uri\":\"https://a/x86.iso\",\
        \"DownloadType\":0},{\"Uri\":\"https://software.download.prss.microsoft.com/dbazure/\
        Win11_de.iso?t=1&P1=2\",\"DownloadType\":1}],\"Errors\":null}";

    fn page() -> String {
        format!(
            "<select><option value=\"\">Select</option><option value=\"3813\">Windows 11 (multi)\
             </option></select><table><tr><td>English 64-bit</td><td>00</td></tr>\
             <tr><td>German 64-bit</td><td class=\"x\">{}</td></tr>",
            HASH.to_uppercase()
        )
    }

    fn good(body: &str) -> Reply {
        Reply { status: 200, body: body.into(), ..Reply::default() }
    }

    fn way() -> Consumer {
        let session = "c9cca959-77aa-436a-b9a1-594e71c8040a";
        let session = crate::settings::value::Value::read(session).unwrap();
        Consumer::new(PAGE, 3321, "German", session, 1234)
    }

    /// Feeds replies, and returns the last step and the addresses asked.
    fn walk(replies: &[Reply]) -> (Result<Step, Fault>, Vec<String>) {
        let mut way = way();
        let mut asked = vec![way.first().url];
        let mut last = None;
        for reply in replies {
            let step = way.next(reply);
            if let Ok(Step::Ask(question)) = &step {
                asked.push(question.url.clone());
            }
            last = Some(step);
        }
        (last.unwrap(), asked)
    }

    fn whole() -> Vec<Reply> {
        let page = page();
        [&*page, "", SCRIPT, "", SKUS, LINKS].map(good).to_vec()
    }

    #[test]
    fn the_way_ends_at_the_link_of_the_language_with_its_checksum() {
        let (step, asked) = walk(&whole());
        let Ok(Step::Found(link)) = step else { panic!("{step:?}") };
        assert!(link.url.ends_with("Win11_de.iso?t=1&P1=2"), "{}", link.url);
        assert_eq!(link.checksum.unwrap().to_string(), HASH);
        assert_eq!(link.referer.as_deref(), Some(PAGE));
        let session = "c9cca959-77aa-436a-b9a1-594e71c8040a";
        let parts = [
            vec![PAGE],
            vec!["https://vlscppe.microsoft.com/tags?org_id=y6jn8c31&session_id=", session],
            vec!["https://ov-df.microsoft.com/mdt.js?instanceId=560dc9f3-", session],
            vec![
                "https://ov-df.microsoft.com/?",
                "w=8DF26E07265FC0D&mdt=1234&rticks=1791644954371",
            ],
            vec!["getskuinformationbyproductedition", "ProductEditionId=3813", session],
            vec!["GetProductDownloadLinksBySku", "SKU=19002", session],
        ];
        assert_eq!(asked.len(), parts.len());
        for (url, parts) in asked.iter().zip(parts) {
            assert!(parts.iter().all(|part| url.contains(part)), "{url}");
        }
    }

    #[test]
    fn the_page_itself_is_not_needed() {
        let mut replies = whole();
        replies[0] = Reply { status: 403, body: "no".into(), ..Reply::default() };
        let (step, asked) = walk(&replies);
        assert!(matches!(step, Ok(Step::Found(Link { checksum: None, .. }))), "{step:?}");
        assert!(asked[4].contains("ProductEditionId=3321"), "{}", asked[4]);
    }

    #[test]
    fn each_refusal_is_a_sentence() {
        let sentinel = "{\"Errors\":[{\"Key\":\"SentinelReject\",\"Value\":\"Sentinel \
                        marked this request as rejected.\",\"Type\":9}]}";
        for (at, reply, words) in [
            (1, Reply { status: 403, body: Vec::new(), ..Reply::default() }, "refused the request"),
            (2, Reply { status: 404, body: Vec::new(), ..Reply::default() }, "has moved"),
            (2, good("nothing"), "has changed"),
            (2, good(&format!("&w={}&rticks=1", "A".repeat(65))), "has changed"),
            (3, Reply { status: 503, body: Vec::new(), ..Reply::default() }, "status 503"),
            (4, good("{\"Skus\":[{\"Id\":\"1\",\"Language\":\"Klingon\"}]}"), "has no German"),
            (4, good("{\"Skus\":[{\"Id\":\"1&x=\",\"Language\":\"German\"}]}"), "has no German"),
            (4, good(""), "an empty reply"),
            (4, good("<html>Log in to the network</html>"), "a web page"),
            (4, good(sentinel), "refuses downloads to this address"),
            (5, good(sentinel), "refuses downloads to this address"),
            (5, good("<p>We are unable to complete your request at this time.</p>"), "about a day"),
            (5, good("{\"Errors\":[{\"Value\":\"No\\nway\",\"Type\":2}]}"), "refuses: No"),
            (5, good("{}"), "gave no link"),
            (5, good(&LINKS.replace(".microsoft.com", ".example.com")), "another server"),
            (5, good(&LINKS.replace("https://s", "http://s")), "another server"),
            (5, good("[["), "something unexpected"),
        ] {
            let mut replies = whole();
            replies.truncate(at);
            replies.push(reply);
            let fault = walk(&replies).0.unwrap_err();
            assert!(fault.to_string().contains(words), "{fault} has no “{words}”");
            let passing = matches!(fault, Fault::Passing(_));
            assert_eq!(passing, words == "status 503", "{fault}");
        }
    }
}
