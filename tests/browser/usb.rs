//! The menu of the host's USB devices, with an API like that of the pod.

use std::pin::Pin;
use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use axum::Router;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use screen::web::routes;
use screen::web::stage::{
    About, Button, ExtraRoutes, LocalStage, LoginLimiter, Stage, StatusFuture, Viewer,
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::stage::serve_with;
use crate::{CONNECTED, album, browser, runs_here};

/// A screen whose host has USB devices.
struct WithUsb(Arc<LocalStage>);

impl Stage for WithUsb {
    fn login_limiter(&self) -> &LoginLimiter {
        self.0.login_limiter()
    }

    fn serve(self: Arc<Self>, viewer: Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        self.0.clone().serve(viewer)
    }

    fn about(&self) -> About {
        About { usb: true, ..self.0.about() }
    }

    fn control(self: Arc<Self>, button: Option<Button>) -> StatusFuture {
        self.0.clone().control(button)
    }
}

/// The orders that the page gave.
type Orders = Arc<Mutex<Vec<Value>>>;

/// A host with a serial adapter, and a stick that cannot be opened.
fn api(orders: &Orders) -> ExtraRoutes {
    let (list, order) = (orders.clone(), orders.clone());
    let listed = move || async move {
        let adapter = json!({ "bus": 1, "address": 4, "port": "1.4", "vendor": 0x403,
            "product": 0x6001, "name": "FTDI <b>Serial</b>", "speed": "12" });
        let stick = json!({ "bus": 2, "address": 9, "port": "3", "vendor": 0x781,
            "product": 0x5581, "name": "", "speed": "5000" });
        let device = "hostbus=1,hostport=1.4";
        let attached = list.lock().unwrap().last().is_some_and(|it| it["attach_host"].is_object());
        let configured = json!([{ "device": device, "name": "usb-host", "at": [1, 4] }]);
        let configured = if attached { configured } else { json!([]) };
        json!({ "host": [adapter, stick], "configured": configured }).to_string()
    };
    let ordered = move |text: String| async move {
        let given: Value = serde_json::from_str(&text).unwrap();
        if given["attach_host"]["device"] == "hostbus=2,hostport=3" {
            let refusal = json!({ "error": "no permission" }).to_string();
            return (StatusCode::CONFLICT, refusal).into_response();
        }
        order.lock().unwrap().push(given);
        Response::new("{}".into())
    };
    let inside = Router::new().route("/api/v1/usb", get(listed).post(ordered));
    ExtraRoutes { inside, ..routes::health() }
}

#[test]
fn usb_devices_are_attached_and_detached_in_the_page() -> Result<()> {
    if !runs_here("usb_devices_are_attached_and_detached_in_the_page") {
        return Ok(());
    }
    let (orders, runtime) = (Orders::default(), Runtime::new()?);
    let stage = |own| Arc::new(WithUsb(own));
    let address = serve_with(&runtime, &Arc::default(), &Arc::default(), stage, api(&orders))?;
    let (mut browser, _folder) = browser()?;
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    browser.until("!document.querySelector('#buttons').hidden")?;
    browser.click("#devices")?;
    let row = |number: u32| format!("document.querySelector('#usb li:nth-child({number})')");
    let button = |number: u32| format!("{}.querySelector('button').textContent", row(number));
    browser.until(&format!("{}?.innerText.startsWith('FTDI <b>Serial</b>')", row(1)))?;
    browser.until(&format!("{}.innerText.startsWith('0781:5581')", row(2)))?;
    browser.keep(&album(), "usb")?;
    browser.click("#usb li:nth-child(1) button")?;
    browser.until(&format!("{} == 'Detach'", button(1)))?;
    browser.click("#usb li:nth-child(1) button")?;
    browser.until(&format!("{} == 'Attach'", button(1)))?;
    let device = "hostbus=1,hostport=1.4";
    let wanted =
        [json!({ "attach_host": { "device": device } }), json!({ "detach": { "name": device } })];
    let given = orders.lock().unwrap().clone();
    ensure!(given == wanted, "other orders: {given:?}");
    browser.click("#usb li:nth-child(2) button")?;
    browser.until("document.querySelector('#usb .told').textContent == 'no permission'")
}
